// sqz-index calibrate, with the example model.
#include <gmock/gmock.h>

#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class CalibrateTool : public ToolTest {
 protected:
  void SetUp() override {
    write_file(path("a.txt"), prose(700));
    write_file(path("q.txt"), "Who was silent?\n\nThe old road by the\r\n");
    write_file(path("q.jsonl"), R"({"prompt": "Who was silent?", "id": 1})"
                                "\n"
                                R"({"prompt": "The old road by the"})"
                                "\n");
    expect({"sqz-index build -m $MODEL a.txt -o a.sqz"});
    before_ = read_file(path("a.sqz"));
  }

  std::string before_;  // the bytes of a.sqz
};

const std::string kCalibrate = "sqz-index calibrate a.sqz -m $MODEL --prompts ";

TEST_F(CalibrateTool, TextAndJsonLinesGiveTheSameFile) {
  const Json other = expect({kCalibrate + "q.jsonl -o other.sqz --threads 1", 0, {"queries"}});
  EXPECT_TRUE(read_file(path("a.sqz")) == before_);
  EXPECT_FALSE(read_file(path("other.sqz")) == before_);
  EXPECT_EQ(other["bytes"], fs::file_size(path("other.sqz")));

  const Json in_place = expect({kCalibrate + "q.txt", 0, {"source"}});
  EXPECT_TRUE(read_file(path("a.sqz")) == read_file(path("other.sqz")));
  expect({"sqz-index verify a.sqz"});
  const Json info = expect({"sqz-index info a.sqz"});
  EXPECT_EQ(info["calibration"]["source"], in_place["source"]);
  EXPECT_THAT(info["calibration"]["source"].get<std::string>(), HasSubstr("2 prompts, "));
}

// The queries that count are those of the prompts and answers: with a budget that is asked for the
// very same prompt, as much is read as was asked.
TEST_F(CalibrateTool, ThePromptsGetTheBudgetThatIsAsked) {
  write_file(path("one.txt"), "Who was silent?\n");
  expect({kCalibrate + "one.txt --answer-tokens 12"});
  const Json answer =
      expect({"sqz-generate -m $MODEL -i a.sqz -p 'Who was silent?' --max-tokens "
              "12 --budget 0.4"});
  EXPECT_FALSE(answer["dense_fallback"]);
  EXPECT_NEAR(answer["budget"]["delivered"], 0.4, 0.03);
}

TEST_F(CalibrateTool, BadInputLeavesTheIndexAsItWas) {
  std::string endless = prose(40000);
  std::replace(endless.begin(), endless.end(), '\n', ' ');
  for (const auto& [name, text] : {std::pair<const char*, std::string>{"empty.txt", "\n\n"},
                                   {"bad.txt", "good\n\n\xff\n"},
                                   {"bad.jsonl", "{\"prompt\": \"\xff\"}\n"},
                                   {"list.jsonl", "{\"prompt\": \"x\"}\n[1]\n"},
                                   {"typed.jsonl", "{\"prompt\": 5}\n"},
                                   {"blank.jsonl", "{\"prompt\": \"\"}\n"},
                                   {"cut.jsonl", "{\"prompt\": \"x\n"},
                                   {"long.txt", "short\n" + endless + "\n"}}) {
    write_file(path(name), text);
  }
  fs::copy(variables.at("MODEL"), path("theta"));
  std::string config = read_file(path("theta/config.json"));
  config.replace(config.find("500000.0"), 8, "400000.0");
  write_file(path("theta/config.json"), config);
  expect_all({{kCalibrate + "empty.txt", 3, {"empty.txt: prompts: found none"}},
              {kCalibrate + "bad.txt", 3, {"bad.txt: line 3: text: not valid UTF-8 at byte 0"}},
              {kCalibrate + "bad.jsonl", 3, {"bad.jsonl: line 1"}},
              {kCalibrate + "list.jsonl", 3, {"list.jsonl: line 2"}},
              {kCalibrate + "typed.jsonl", 3, {"typed.jsonl: line 1"}},
              {kCalibrate + "blank.jsonl", 3, {"blank.jsonl: line 1"}},
              {kCalibrate + "cut.jsonl", 3, {"cut.jsonl: line 1"}},
              {kCalibrate + "long.txt", 2, {"long.txt: line 2: tokens: found "}},
              {kCalibrate + "none.txt", 3, {"none.txt"}},
              {kCalibrate + "q.txt -o q.jsonl", 1, {"--force"}},
              {kCalibrate + "q.txt -o q.txt --force", 2, {"is an input"}},
              {"sqz-index calibrate a.sqz -m theta --prompts q.txt", 3, {"rope.theta"}}});
  EXPECT_TRUE(read_file(path("a.sqz")) == before_);
  before_[before_.size() / 2] = static_cast<char>(before_[before_.size() / 2] ^ 1);
  write_file(path("a.sqz"), before_);
  expect({kCalibrate + "q.txt", 3, {"a.sqz: tensor \""}});
  EXPECT_TRUE(read_file(path("a.sqz")) == before_);
}

TEST_F(CalibrateTool, StoppedItLeavesTheOldIndexAndNothingElse) {
  std::string many;
  for (int i = 0; i < 5000; ++i) many += "Who was silent on the old road?\n";
  write_file(path("many.txt"), many);
  const std::string left = files();
  const ToolRun stopped =
      run("sqz-index", words_of("calibrate a.sqz -m $MODEL --prompts many.txt --progress"), "", {},
          [&](pid_t child) { signal_when(child, SIGINT, [&] { return has_spoken(); }); });
  EXPECT_EQ(stopped.code, 128 + SIGINT) << stopped.err;
  EXPECT_TRUE(read_file(path("a.sqz")) == before_);
  EXPECT_EQ(files(), left);
}

}  // namespace
}  // namespace sqz
