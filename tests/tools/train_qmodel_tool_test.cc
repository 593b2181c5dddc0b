// sqz-train-qmodel from end to end, with the example model in a setting that takes seconds.
#include <gmock/gmock.h>

#include <map>

#include "tests/formats/raw_safetensors.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

const std::string kModel = SQZ_SOURCE_DIR "/examples/models/nano";

class TrainQmodelTool : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    const std::string book = read_all(SQZ_SOURCE_DIR "/examples/texts/dracula.txt");
    write_all(path("train.txt"), book.substr(3000, 24000));
    write_all(path("other.txt"), book.substr(400000, 6000));
  }
  std::vector<std::string> arguments(std::vector<std::string> more) const {
    std::vector<std::string> out = {"--model", kModel, path("train.txt"), "--threads", "2"};
    const std::vector<std::pair<std::string, std::string>> small = {
        {"--buckets", "16"}, {"--hidden", "32"},     {"--window", "512"},
        {"--recent", "64"},  {"--positions", "128"}, {"--queries", "64"},
        {"--batch", "64"},   {"--keys", "32"},       {"--lr", "3e-3"}};
    for (const auto& [option, value] : small) {
      const bool given = std::find(more.begin(), more.end(), option) != more.end();
      if (!given) out.insert(out.end(), {option, value});
    }
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  ToolRun train(std::vector<std::string> more) const {
    return run("sqz-train-qmodel", arguments(std::move(more)));
  }
};

TEST_F(TrainQmodelTool, WritesWhatItSaysAndIndexToolsReadIt) {
  const ToolRun run_ = train({"--steps", "40", "--checks", "2", "--test", path("other.txt"), "-o",
                              path("q.sqz"), "--json"});
  ASSERT_EQ(run_.code, 0) << run_.err;
  const Json result = run_.last();
  EXPECT_EQ(result["bytes"], fs::file_size(path("q.sqz")));
  EXPECT_EQ(result["steps"], 40);
  EXPECT_EQ(result["buckets"], 16);
  EXPECT_EQ(result["hidden"], 32);
  EXPECT_EQ(result["recent"], 64);
  EXPECT_EQ(result["dense"], Json::array({0}));
  ASSERT_EQ(result["scores"].size(), 24u);
  EXPECT_EQ(result["scores"][0]["method"], "classifier");
  EXPECT_EQ(result["scores"][0]["recall"], result["recall"]);
  EXPECT_EQ(result["training"]["preset"], "small");
  int checks = 0;
  for (const Json& event : run_.events()) checks += event["event"] == "check";
  EXPECT_EQ(checks, 2);
  EXPECT_EQ(files(), "other.txt\nq.sqz\ntrain.txt\n");

  const ToolRun info = run("sqz-index", {"info", path("q.sqz"), "--json"});
  ASSERT_EQ(info.code, 0) << info.err;
  EXPECT_EQ(info.last()["kind"], "qmodel");
  EXPECT_EQ(info.last()["recall"], result["recall"]);
  EXPECT_EQ(info.last()["fingerprint"], result["fingerprint"]);
  const ToolRun verify = run("sqz-index", {"verify", path("q.sqz"), "--json"});
  EXPECT_EQ(verify.code, 0) << verify.err;

  const ToolRun built =
      run("sqz-index", {"build", "--model", kModel, path("other.txt"), "--qmodel", path("q.sqz"),
                        "--tail", "64", "--threads", "2", "-o", path("x.sqz"), "--json"});
  ASSERT_EQ(built.code, 0) << built.err;
  EXPECT_EQ(built.last()["clusters"], Json::array({16}));
  const Json index = run("sqz-index", {"info", path("x.sqz"), "--json"}).last();
  EXPECT_EQ(index["partition"], "buckets");
  EXPECT_EQ(index["sink"], 1);
  EXPECT_EQ(run("sqz-index", {"verify", path("x.sqz")}).code, 0);
  const ToolRun answer =
      run("sqz-generate",
          {"--model", kModel, "--index", path("x.sqz"), "--prompt", "The Count", "--selector",
           "saap", "--sparsity", "0.6", "--max-tokens", "4", "--threads", "2", "--json"});
  ASSERT_EQ(answer.code, 0) << answer.err;
  EXPECT_FALSE(answer.last()["dense_fallback"]);
  EXPECT_NEAR(answer.last()["keep"]["delivered"].get<double>(), 0.4, 0.1);

  std::string bytes = read_all(path("q.sqz"));
  bytes[bytes.size() - 5000] = static_cast<char>(bytes[bytes.size() - 5000] ^ 4);
  write_all(path("q.sqz"), bytes);
  EXPECT_EQ(run("sqz-index", {"verify", path("q.sqz"), "--json"}).code, 3);
}

TEST_F(TrainQmodelTool, SqzEvalMeasuresTheClassifier) {
  ASSERT_EQ(train({"--steps", "40", "-o", path("q.sqz")}).code, 0);
  EXPECT_EQ(run("sqz-index", {"verify", path("q.sqz")}).code, 0);
  const ToolRun rows = run("sqz-eval", {"--model",    kModel, "--text",         path("train.txt"),
                                        "--tokens",   "2000", "--task",         "needle1,recall",
                                        "--trials",   "2",    "--budget",       "0.3",
                                        "--block",    "64",   "--continuation", "128",
                                        "--selector", "saap", "--qmodel",       path("q.sqz"),
                                        "--threads",  "2",    "--json"});
  ASSERT_EQ(rows.code, 0) << rows.err;
  const Json last = rows.last();
  for (const Json& row : last["rows"]) {
    if (row["selector"] == "dense") continue;
    EXPECT_NEAR(row["keep"]["delivered"].get<double>(), row["keep"]["asked"].get<double>(), 0.05);
    if (row["task"] != "recall" || row["on"] != "text") continue;
    EXPECT_GT(row["value"], 0.3) << "more than keys by chance";
    EXPECT_LT(row["value"], 1);
  }
}

TEST_F(TrainQmodelTool, SaysWhatIsWrong) {
  const auto refused = [&](std::vector<std::string> more, int code, const std::string& says) {
    const std::string before = files();
    more.insert(more.end(), {"-o", path("bad.sqz")});
    const ToolRun result = train(more);
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_THAT(result.err, HasSubstr(says));
    EXPECT_EQ(files(), before) << "nothing is left";
  };
  refused({"--buckets", "1024"}, 3, "expected at least 32768 for 1024 buckets");
  refused({"--preset", "other"}, 2, "--preset");
  // What the options take is what the training takes.
  refused({"--lr", "2"}, 2, "--lr: expected 1e-12 to 1, found 2");
  refused({"--keys", "31"}, 2, "--keys: expected 32 to ");
  for (const char* option : {"--queries", "--positions", "--window"}) {
    refused({option, "0"}, 2, concat(option, ": expected 1 to "));
  }
  for (const char* option : {"--buckets", "--batch"}) {
    refused({option, "1"}, 2, concat(option, ": expected 2 to "));
  }
  for (const char* size : {"-1", "0", "99999999999999999999"}) {
    refused({"--memory", size}, 2, concat("--memory: Value ", size, " not in range 1 to "));
  }
  refused({"--dense", "0,7"}, 2, "dense: found 7");
  const std::string text = read_all(path("other.txt"));
  const ToolRun result = train({"--test", path("other.txt"), "--force", "-o", path("other.txt")});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("other.txt: is an input and the output"));
  EXPECT_EQ(read_all(path("other.txt")), text);
}

}  // namespace
}  // namespace sqz
