// sqz-train-qmodel from end to end, with the example model in a setting that takes seconds.
#include <gmock/gmock.h>

#include <map>

#include "tests/formats/raw_safetensors.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
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
        {"--buckets", "16"},    {"--hidden", "32"},
        {"--window", "512"},    {"--recent", "64"},
        {"--positions", "128"}, {"--queries", "64"},
        {"--batch", "64"},      {"--keys", "32"},
        {"--lr", "3e-3"},       {"--checkpoint-seconds", "0"}};
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
  EXPECT_EQ(files(), "other.txt\nq.sqz\ntrain.txt\n") << "the checkpoint is gone";

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

TEST_F(TrainQmodelTool, AppendedIndexesAreThoseOfOneBuild) {
  const std::string book = read_all(SQZ_SOURCE_DIR "/examples/texts/dracula.txt");
  write_all(path("more.txt"), book.substr(500000, 3000));
  const ToolRun trained = train({"--steps", "5", "-o", path("q.sqz")});
  ASSERT_EQ(trained.code, 0);
  // Few steps are checked once, and the table has one row a method.
  EXPECT_THAT(trained.err, HasSubstr("step 5: loss"));
  EXPECT_THAT(trained.err, Not(HasSubstr("step 4: loss")));
  EXPECT_THAT(trained.out, HasSubstr("recall of classifier-share  "));
  EXPECT_THAT(trained.out, Not(HasSubstr("far queries")));
  const auto index_tool = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--threads", "2", "--json"});
    return run("sqz-index", arguments);
  };
  const auto build = [&](std::vector<std::string> texts, const std::string& output) {
    std::vector<std::string> all = {"build"};
    all.insert(all.end(), texts.begin(), texts.end());
    all.insert(all.end(), {"--model", kModel, "--qmodel", path("q.sqz"), "--tail", "64", "--dtype",
                           "f16", "--heavy-hitters", "-o", output});
    return index_tool(all);
  };
  ASSERT_EQ(build({path("other.txt"), path("more.txt")}, path("whole.sqz")).code, 0);
  const ToolRun part = build({path("other.txt")}, path("x.sqz"));
  ASSERT_EQ(part.code, 0) << part.err;
  const std::string before = read_all(path("x.sqz"));
  fs::remove(path("q.sqz"));

  const auto append = [&](std::vector<std::string> texts, std::vector<std::string> more) {
    std::vector<std::string> all = {"append", path("x.sqz")};
    all.insert(all.end(), texts.begin(), texts.end());
    all.insert(all.end(), {"--model", kModel});
    all.insert(all.end(), more.begin(), more.end());
    return index_tool(all);
  };
  const auto refused = [&](const ToolRun& result, int code, const std::string& says) {
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_THAT(result.err, HasSubstr(says));
    EXPECT_EQ(read_all(path("x.sqz")), before);
  };
  refused(append({path("other.txt")}, {}), 3, "all tokens: found ");
  refused(append({path("more.txt"), path("other.txt")}, {}), 3, "hash of the first ");

  const ToolRun longer = append({path("other.txt"), path("more.txt")}, {"-o", path("longer.sqz")});
  ASSERT_EQ(longer.code, 0) << longer.err;
  EXPECT_EQ(longer.last()["appended"],
            longer.last()["tokens"].get<int64_t>() - part.last()["tokens"].get<int64_t>());
  EXPECT_TRUE(read_all(path("longer.sqz")) == read_all(path("whole.sqz")));
  EXPECT_EQ(read_all(path("x.sqz")), before);
  refused(append({path("other.txt"), path("more.txt")}, {"-o", path("longer.sqz")}), 1,
          "longer.sqz");
  ASSERT_EQ(append({path("other.txt"), path("more.txt")}, {}).code, 0);
  EXPECT_TRUE(read_all(path("x.sqz")) == read_all(path("whole.sqz")));

  std::string damaged = before;
  damaged[damaged.size() / 2] = static_cast<char>(damaged[damaged.size() / 2] ^ 1);
  write_all(path("x.sqz"), damaged);
  EXPECT_EQ(append({path("other.txt"), path("more.txt")}, {}).code, 3);
  EXPECT_EQ(read_all(path("x.sqz")), damaged);
  const ToolRun clusters = index_tool(
      {"build", path("more.txt"), "--model", kModel, "-o", path("k.sqz"), "--tail", "32"});
  ASSERT_EQ(clusters.code, 0) << clusters.err;
  const ToolRun other =
      index_tool({"append", path("k.sqz"), path("more.txt"), path("other.txt"), "--model", kModel});
  EXPECT_EQ(other.code, 3) << other.err;
  EXPECT_THAT(other.err, HasSubstr("partition: found kmeans, expected buckets"));
}

TEST_F(TrainQmodelTool, InterruptedItGoesOnToTheSameFile) {
  ASSERT_EQ(train({"--steps", "120", "-o", path("whole.sqz")}).code, 0);
  const std::string checkpoint = path("q.sqz.checkpoint");
  std::string first;
  const auto begun = [&] {  // rewritten after the first step
    if (!fs::exists(checkpoint)) return false;
    const std::string now = read_all(checkpoint);
    if (first.empty()) first = now;
    return now != first;
  };
  const ToolRun stopped =
      run(SQZ_TRAIN_QMODEL_TOOL, arguments({"--steps", "120", "-o", path("q.sqz")}), "", {},
          [&](pid_t child) { signal_when(child, SIGINT, begun); });
  EXPECT_EQ(stopped.code, 130) << stopped.err;
  EXPECT_TRUE(fs::exists(checkpoint));
  EXPECT_FALSE(fs::exists(path("q.sqz")));

  const ToolRun again = train({"--steps", "120", "-o", path("q.sqz")});
  EXPECT_EQ(again.code, 1);
  EXPECT_THAT(again.err, HasSubstr("a checkpoint is there; go on from it with --resume"));
  const ToolRun other = train({"--steps", "121", "-o", path("q.sqz"), "--resume"});
  EXPECT_EQ(other.code, 3);
  EXPECT_THAT(other.err, HasSubstr("steps: found 120, expected 121"));
  const ToolRun resumed = train({"--steps", "120", "-o", path("q.sqz"), "--resume"});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(read_all(path("q.sqz")), read_all(path("whole.sqz")));
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
  refused({"--resume"}, 3, "no checkpoint to go on from");
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
  refused({"--checkpoint", path("bad.sqz"), "--force"}, 2, "bad.sqz: is an input and the output");
  const std::string text = read_all(path("other.txt"));
  for (const char* option : {"-o", "--checkpoint"}) {
    std::vector<std::string> more = {"--test", path("other.txt"), "--force", option,
                                     path("other.txt")};
    if (std::string(option) != "-o") more.insert(more.end(), {"-o", path("bad.sqz")});
    const ToolRun result = train(more);
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, HasSubstr("other.txt: is an input and the output"));
    EXPECT_EQ(read_all(path("other.txt")), text);
  }
}

}  // namespace
}  // namespace sqz
