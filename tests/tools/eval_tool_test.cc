// sqz-eval from end to end, with the example model and a context of 2000 tokens.
#include <gmock/gmock.h>

#include <map>

#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

constexpr const char* kModel = SQZ_SOURCE_DIR "/examples/models/nano";

class EvalTool : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    std::string text;
    for (int line = 0; line < 400; ++line) {
      text += concat("On day ", line % 97, " the carrier walked to the mill and back.\n");
    }
    write_all(path("lines.txt"), text);
    std::filesystem::create_directories(path("work"));
  }

  ToolRun eval(std::vector<std::string> more) const {
    std::vector<std::string> arguments = {
        "--model",        kModel, "--text", path("lines.txt"), "--tokens",  "2000",
        "--continuation", "128",  "--work", path("work"),      "--threads", "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run("sqz-eval", arguments);
  }
};

TEST_F(EvalTool, ReadingEverythingIsDense) {
  const ToolRun result = eval({"--task", "needle1,needle4,passkey,loss,error,recall", "--trials",
                               "2", "--budget", "1", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  std::map<std::string, int> tasks;
  const Json last = result.last();
  for (const Json& row : last["rows"]) {
    const std::string task = row["task"].get<std::string>() + row.value("on", "");
    ++tasks[task];
    EXPECT_EQ(row["tokens"], 2000);
    EXPECT_EQ(row["budget"]["delivered"], 1.0) << row;
    EXPECT_EQ(row["keep"]["delivered"], 1.0) << row;
    if (row["selector"] == "dense") continue;
    if (row["task"] == "error") {
      EXPECT_EQ(row["value"], 0.0);
      EXPECT_EQ(row["context_error"]["value"], 0.0);
    } else if (row["task"] == "recall") {
      EXPECT_EQ(row["value"], 1.0);
    } else {
      EXPECT_EQ(row["difference"]["value"], 0.0) << row;
      if (row["task"] == "loss") continue;
      EXPECT_EQ(row["agreement"]["both"], row["agreement"]["dense"]) << row;
    }
  }
  const std::map<std::string, int> expected = {
      {"needle1", 2},   {"needle4", 2},        {"passkey", 2},    {"loss", 2},
      {"errortext", 1}, {"errorquestions", 1}, {"recalltext", 1}, {"recallquestions", 1}};
  EXPECT_EQ(tasks, expected);
  // A line a pass, with the rows so far; a line a row; the result.
  std::map<std::string, int> lines;
  Json so_far;
  for (const Json& event : result.events()) {
    ++lines[event["event"].get<std::string>()];
    if (event["event"] == "pass") so_far = event["rows"];
  }
  EXPECT_EQ(lines["row"], 13);
  EXPECT_GE(lines["pass"], 1);
  EXPECT_EQ(lines["result"], 1);
  EXPECT_EQ(so_far, last["rows"]);
  EXPECT_TRUE(std::filesystem::is_empty(path("work")));
}

TEST_F(EvalTool, TableAndRepetition) {
  const std::vector<std::string> wanted = {"--task",   "loss,error", "--trials", "1",
                                           "--budget", "0.4,0.6",    "--rule",   "budget"};
  const ToolRun first = eval(wanted), again = eval(wanted);
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(first.out, again.out);
  EXPECT_THAT(first.out, HasSubstr("delivered"));
  EXPECT_THAT(first.out, HasSubstr("error questions  squeezed  all     budget"));
}

TEST_F(EvalTool, CalibratesWithQuestionsOfItsOwn) {
  const auto delivered = [&](const char* prompts) {
    const ToolRun result = eval({"--task", "needle1", "--trials", "2", "--budget", "0.3",
                                 "--calibrate-prompts", prompts, "--json"});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_TRUE(std::filesystem::is_empty(path("work")));
    return result.last()["rows"][1]["budget"]["delivered"].get<double>();
  };
  const double tail = delivered("0"), prompts = delivered("6");
  EXPECT_NEAR(prompts, 0.3, 0.045);  // 15 %
  EXPECT_LT(std::abs(prompts - 0.3), std::abs(tail - 0.3));
}

TEST_F(EvalTool, EverySelectorFromOneDensePass) {
  const ToolRun result =
      eval({"--task", "error", "--trials", "1", "--budget", "0.5", "--selector",
            "squeezed,quest,ideal,stream,window,h2o", "--dense-layers", "1", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  std::map<std::string, int> selectors;
  const Json last = result.last();
  for (const Json& row : last["rows"]) {
    ++selectors[row["selector"].get<std::string>()];
    EXPECT_FALSE(row.contains("skipped")) << row;
    EXPECT_EQ(row["dense_fallback"], false) << row;
    if (row["selector"] == "dense") continue;
    EXPECT_GT(row["value"], 0.0) << row;
    // One of the layers is read whole.
    EXPECT_GT(row["budget"]["delivered"], 0.2) << row;
    EXPECT_LT(row["budget"]["delivered"], 1.0) << row;
    EXPECT_EQ(row["dense_layers"], 1) << row;
  }
  EXPECT_EQ(
      selectors,
      (std::map<std::string, int>{
          {"squeezed", 2}, {"quest", 2}, {"ideal", 2}, {"stream", 2}, {"window", 2}, {"h2o", 2}}));
}

// Stopped after the first pass, of four.
TEST_F(EvalTool, PrintsWhatItHasMeasuredWhenItIsStopped) {
  for (const bool json : {true, false}) {
    std::vector<std::string> arguments = {
        "--model",    kModel,      "--text", path("lines.txt"), "--tokens", "2000",     "--work",
        path("work"), "--threads", "2",      "--task",          "needle1",  "--trials", "8",
        "--share",    "2",         "-v"};
    if (json) arguments.emplace_back("--json");
    const ToolRun stopped = run(SQZ_EVAL_TOOL, arguments, "", {}, [&](pid_t child) {
      signal_when(child, json ? SIGINT : SIGTERM, [&] {
        return read_all(folder_ / "stderr").find("measured in") != std::string::npos;
      });
    });
    EXPECT_EQ(stopped.code, json ? 130 : 143) << stopped.err;
    EXPECT_TRUE(std::filesystem::is_empty(path("work")));
    if (json) {
      const Json last = stopped.last();
      EXPECT_EQ(last["stopped"], true);
      ASSERT_EQ(last["rows"].size(), 2u) << last;
      EXPECT_GE(last["rows"][0]["trials"], 1);
      EXPECT_LT(last["rows"][0]["trials"], 8);
    } else {
      EXPECT_THAT(stopped.out, HasSubstr("needle1  squeezed"));
    }
  }
}

TEST_F(EvalTool, BadInput) {
  const auto expect = [&](std::vector<std::string> more, int code, const std::string& message) {
    const ToolRun result = eval(std::move(more));
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(result.out, "");
  };
  expect({"--selector", "psychic"}, 2, "found psychic, expected one of dense");
  expect({"--selector", "saap"}, 2, "--selector saap needs --qmodel");
  expect({"--qmodel", path("q.sqz")}, 2, "--qmodel is for --selector saap");
  expect({"--layers", path("none.sqz")}, 3, "none.sqz");
  write_all(path("bad.sqz"), "no profile");
  expect({"--layers", path("bad.sqz")}, 3, "bad.sqz");
  expect({"--task", "juggling"}, 2, "--task");
  expect({"--dense-layers", "7"}, 2, "--dense-layers: found 7, expected 0 to 6, the layers of");
  expect({"--levels", "1,3"}, 2, "--levels: found 3, expected 0 to 2, the levels of");
  expect({"--tokens", "40000"}, 2, "positions");
  expect({"--tokens", "20000"}, 2, "lines.txt: the text has");
  expect({"--text", path("none.txt")}, 3, "none.txt");
  expect({"--reuse"}, 2, "--save");
  expect({"--calibrate-prompts", "100"}, 2, "--calibrate-prompts");
  expect({"--device", "cuda"}, 2, "device");
}

}  // namespace
}  // namespace sqz
