// sqz-index calibrate and build --calibrate-with, with the example model.
#include <gmock/gmock.h>

#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

const std::string kIndex = "sqz-index";
const std::string kGenerate = "sqz-generate";
const std::string kModel = SQZ_SOURCE_DIR "/examples/models/nano";

std::string prose(int words) {
  const char* vocabulary[] = {"the", "house", "was", "silent", "and", "old", "road", "by", "sea"};
  std::string out;
  uint32_t state = 12345;
  for (int i = 0; i < words; ++i) {
    state = state * 1664525u + 1013904223u;
    out += vocabulary[(state >> 16) % std::size(vocabulary)];
    out += i % 13 == 12 ? ".\n" : " ";
  }
  return out;
}

class CalibrateTool : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    write_all(path("a.txt"), prose(700));
    write_all(path("q.txt"), "Who was silent?\n\nThe old road by the\r\n");
    write_all(path("q.jsonl"), R"({"prompt": "Who was silent?", "id": 1})"
                               "\n"
                               R"({"prompt": "The old road by the"})"
                               "\n");
  }
  ToolRun build(const std::string& output, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {"build", "--model",    kModel,  path("a.txt"),
                                          "-o",    path(output), "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(kIndex, arguments);
  }
  ToolRun calibrate(const std::string& index, std::vector<std::string> more) const {
    std::vector<std::string> arguments = {"calibrate", path(index), "--model", kModel, "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(kIndex, arguments);
  }
};

TEST_F(CalibrateTool, BuildAndCalibrateGiveTheSameFile) {
  ASSERT_EQ(build("tail.sqz").code, 0);
  const std::string before = read_all(path("tail.sqz"));
  const ToolRun built = build("built.sqz", {"--calibrate-with", path("q.txt")});
  ASSERT_EQ(built.code, 0) << built.err;
  EXPECT_THAT(built.last()["calibration"].get<std::string>(), HasSubstr("prompts: 2 prompts, "));
  EXPECT_EQ(built.last()["bytes"], fs::file_size(path("built.sqz")));

  const ToolRun other = calibrate(
      "tail.sqz", {"--prompts", path("q.jsonl"), "-o", path("other.sqz"), "--threads", "1"});
  ASSERT_EQ(other.code, 0) << other.err;
  EXPECT_TRUE(read_all(path("tail.sqz")) == before);
  EXPECT_TRUE(read_all(path("other.sqz")) == read_all(path("built.sqz")));
  EXPECT_FALSE(read_all(path("other.sqz")) == before);

  ASSERT_EQ(calibrate("tail.sqz", {"--prompts", path("q.txt")}).code, 0);  // in place
  EXPECT_TRUE(read_all(path("tail.sqz")) == read_all(path("built.sqz")));
  EXPECT_EQ(run(kIndex, {"verify", path("tail.sqz")}).code, 0);
  const Json info = run(kIndex, {"info", path("tail.sqz"), "--json"}).last();
  EXPECT_EQ(info["calibration"]["source"], built.last()["calibration"]);
  EXPECT_EQ(files(), "a.txt\nbuilt.sqz\nother.sqz\nq.jsonl\nq.txt\ntail.sqz\n");
}

// The queries that count are those of the prompts and answers: with a budget that is asked for the
// very same prompt, as much is read as was asked.
TEST_F(CalibrateTool, ThePromptsGetTheBudgetThatIsAsked) {
  write_all(path("one.txt"), "Who was silent?\n");
  ASSERT_EQ(build("a.sqz", {"--calibrate-with", path("one.txt"), "--answer-tokens", "12"}).code, 0);
  const ToolRun answer =
      run(kGenerate, {"--model", kModel, "--index", path("a.sqz"), "--prompt", "Who was silent?",
                      "--max-tokens", "12", "--sparsity", "0.7", "--json"});
  ASSERT_EQ(answer.code, 0) << answer.err;
  EXPECT_FALSE(answer.last()["dense_fallback"]);
  EXPECT_NEAR(answer.last()["keep"]["delivered"], 0.3, 0.04);
}

TEST_F(CalibrateTool, BadInputLeavesTheIndexAsItWas) {
  ASSERT_EQ(build("a.sqz").code, 0);
  const std::string before = read_all(path("a.sqz"));
  const auto expect = [&](std::vector<std::string> more, int code, const std::string& part) {
    const ToolRun refused = calibrate("a.sqz", std::move(more));
    EXPECT_EQ(refused.code, code) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr(part));
    EXPECT_TRUE(read_all(path("a.sqz")) == before);
  };
  const auto prompts = [&](const std::string& name, const std::string& text) {
    write_all(path(name), text);
    return std::vector<std::string>{"--prompts", path(name)};
  };
  expect({"--prompts", path("none.txt")}, 3, "none.txt");
  expect(prompts("empty.txt", "\n\n"), 3, "empty.txt: prompts: found none");
  expect(prompts("bad.txt", "good\n\n\xff\n"), 3,
         "bad.txt: line 3: text: not valid UTF-8 at byte 0");
  expect(prompts("bad.jsonl", "{\"prompt\": \"\xff\"}\n"), 3, "bad.jsonl: line 1");
  expect(prompts("list.jsonl", "{\"prompt\": \"x\"}\n[1]\n"), 3, "list.jsonl: line 2");
  expect(prompts("typed.jsonl", "{\"prompt\": 5}\n"), 3, "typed.jsonl: line 1");
  expect(prompts("blank.jsonl", "{\"prompt\": \"\"}\n"), 3, "blank.jsonl: line 1");
  expect(prompts("cut.jsonl", "{\"prompt\": \"x\n"), 3, "cut.jsonl: line 1");
  std::string endless = prose(40000);
  std::replace(endless.begin(), endless.end(), '\n', ' ');
  // Before the model runs, which takes long, and says how far it is.
  for (auto more :
       {prompts("long.txt", "short\n" + endless + "\n"),
        prompts("long.jsonl", "{\"prompt\": \"short\"}\n{\"prompt\": \"" + endless + "\"}\n")}) {
    more.push_back("--progress");
    const ToolRun refused = calibrate("a.sqz", more);
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr(more[1] + ": line 2: tokens: found "));
    EXPECT_THAT(refused.err, Not(HasSubstr("%")));
    more[0] = "--calibrate-with";
    const ToolRun unbuilt = build("b.sqz", more);
    EXPECT_EQ(unbuilt.code, 2);
    EXPECT_THAT(unbuilt.err, HasSubstr(more[1] + ": line 2: tokens: found "));
    EXPECT_THAT(unbuilt.err, Not(HasSubstr("%")));
  }
  std::string damage = before;
  damage[damage.size() / 2] = static_cast<char>(damage[damage.size() / 2] ^ 1);
  write_all(path("a.sqz"), damage);
  const ToolRun damaged = calibrate("a.sqz", {"--prompts", path("q.txt")});
  EXPECT_EQ(damaged.code, 3);
  EXPECT_THAT(damaged.err, HasSubstr("a.sqz: tensor \""));
}

TEST_F(CalibrateTool, RefusesAnotherModelAndUsage) {
  ASSERT_EQ(build("a.sqz").code, 0);
  const std::string before = read_all(path("a.sqz"));
  const std::string theta = path("theta");
  fs::copy(kModel, theta);
  std::string config = read_all(theta + "/config.json");
  config.replace(config.find("500000.0"), 8, "400000.0");
  write_all(theta + "/config.json", config);
  const ToolRun other =
      run(kIndex, {"calibrate", path("a.sqz"), "--model", theta, "--prompts", path("q.txt")});
  EXPECT_EQ(other.code, 3);
  EXPECT_THAT(other.err, HasSubstr("rope.theta"));
  const ToolRun exists = calibrate("a.sqz", {"--prompts", path("q.txt"), "-o", path("q.jsonl")});
  EXPECT_EQ(exists.code, 1);
  EXPECT_THAT(exists.err, HasSubstr("--force"));
  EXPECT_TRUE(read_all(path("a.sqz")) == before);
  const ToolRun capture = run(kIndex, {"build", "--capture", path("a.h5"), "-o", path("b.sqz"),
                                       "--calibrate-with", path("q.txt")});
  EXPECT_EQ(capture.code, 2);
  EXPECT_THAT(capture.err, HasSubstr("sqz-index calibrate"));
}

TEST_F(CalibrateTool, StoppedItLeavesTheOldIndexAndNothingElse) {
  ASSERT_EQ(build("a.sqz").code, 0);
  const std::string before = read_all(path("a.sqz"));
  std::string many;
  for (int i = 0; i < 5000; ++i) many += "Who was silent on the old road?\n";
  write_all(path("many.txt"), many);
  const std::string left = files();
  const ToolRun stopped = run(
      kIndex,
      {"calibrate", path("a.sqz"), "--model", kModel, "--prompts", path("many.txt"), "--progress"},
      "", {}, [&](pid_t child) { signal_when(child, SIGINT, [&] { return has_spoken(); }); });
  EXPECT_EQ(stopped.code, 130) << stopped.err;
  EXPECT_TRUE(read_all(path("a.sqz")) == before);
  EXPECT_EQ(files(), left);

  const ToolRun built = run(
      kIndex,
      {"build", "--model", kModel, path("a.txt"), "-o", path("b.sqz"), "--calibrate-with",
       path("many.txt")},
      "", {}, [&](pid_t child) {
        signal_when(child, SIGTERM,
                    [&] { return fs::exists(path(concat("b.sqz.tmp.", child, ".uncalibrated"))); });
      });
  EXPECT_EQ(built.code, 143) << built.err;
  EXPECT_EQ(files(), left);
}

}  // namespace
}  // namespace sqz
