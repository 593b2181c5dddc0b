// sqz-index build --manifest and sqz-index corpus, over captures.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <thread>

#include "tests/common/npy_file.h"
#include "tests/tools/run_tool.h"
#include "tests/tools/small_capture.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

const std::string kTool = "sqz-index";

class CorpusTest : public ToolTest {
 protected:
  // NAME.h5 for each, and a manifest of the lines.
  void write(const std::vector<std::string>& captures, const std::vector<std::string>& lines) {
    for (size_t i = 0; i < captures.size(); ++i) {
      write_small_capture(path(captures[i] + ".h5"), 600 + 8 * static_cast<int64_t>(i), 120);
    }
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    write_all(path("m.jsonl"), text);
  }
  static std::string line(const std::string& key, const std::string& capture) {
    return R"({"key": ")" + key + R"(", "capture": ")" + capture + R"(.h5"})";
  }
  ToolRun build(const std::vector<std::string>& more = {},
                std::vector<std::string> environment = {},
                const std::function<void(pid_t)>& while_running = {}) {
    std::vector<std::string> arguments = {"build", "--manifest", path("m.jsonl"),
                                          "-o",    path("out"),  "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(kTool, arguments, "", std::move(environment), while_running);
  }
  ToolRun corpus(const std::string& action) {
    return run(kTool, {"corpus", action, path("out"), "--manifest", path("m.jsonl")});
  }
  // What Slurm sets for a task of an array.
  static std::vector<std::string> slurm_task(int task, int count, int least, int most) {
    return {concat("SLURM_ARRAY_TASK_ID=", task), concat("SLURM_ARRAY_TASK_COUNT=", count),
            concat("SLURM_ARRAY_TASK_MIN=", least), concat("SLURM_ARRAY_TASK_MAX=", most)};
  }
  // As an index of that capture alone.
  void expect_like_one_alone(const std::string& key, const std::string& capture) {
    const std::string alone = path("alone.sqz");
    ASSERT_EQ(run(kTool, {"build", "--capture", path(capture + ".h5"), "-o", alone}).code, 0);
    EXPECT_TRUE(read_all(path("out/" + key + ".sqz")) == read_all(alone)) << key;
    fs::remove(alone);
  }
  std::vector<std::string> outputs() const {
    std::vector<std::string> out;
    for (const auto& entry : fs::recursive_directory_iterator(path("out"))) {
      if (!entry.is_directory()) {
        out.push_back(entry.path().lexically_relative(path("out")).string());
      }
    }
    std::sort(out.begin(), out.end());
    return out;
  }
};

TEST_F(CorpusTest, OneIndexADocumentAndNoneStopsTheOthers) {
  write({"a", "b"}, {line("x/one", "a"), line("lost", "none"), line("two", "b")});
  const ToolRun first = build();
  EXPECT_EQ(first.code, 1);
  EXPECT_THAT(first.err, HasSubstr("line 2: lost: "));
  std::vector<Json> events = first.events();
  ASSERT_EQ(events.size(), 4u);
  std::sort(events.begin(), events.begin() + 3,
            [](const Json& a, const Json& b) { return a["line"] < b["line"]; });
  EXPECT_EQ(events[0]["state"], "built");
  EXPECT_EQ(events[0]["tokens"], 600);
  EXPECT_EQ(events[1]["code"], "not found");
  EXPECT_EQ(events[2]["key"], "two");
  EXPECT_EQ(events[3]["built"], 2);
  EXPECT_EQ(outputs(), (std::vector<std::string>{"two.sqz", "x/one.sqz"}));
  expect_like_one_alone("x/one", "a");
  expect_like_one_alone("two", "b");

  EXPECT_THAT(corpus("status").out, HasSubstr("missing  1"));
  EXPECT_THAT(corpus("missing").out, HasSubstr("\"key\":\"lost\""));
  write({"a", "b", "none"}, {line("x/one", "a"), line("lost", "none"), line("two", "b")});
  const ToolRun second = build();
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(second.last()["built"], 1);
  EXPECT_EQ(second.last()["there"], 2);
}

TEST_F(CorpusTest, OtherOptionsAreRefusedUntilToldTo) {
  write({"a"}, {line("one", "a")});
  ASSERT_EQ(build().code, 0);
  const std::string before = read_all(path("out/one.sqz"));
  const ToolRun other = build({"--levels", "1"});
  EXPECT_EQ(other.code, 3);
  EXPECT_THAT(other.err, HasSubstr("pass --update to replace it"));
  EXPECT_TRUE(read_all(path("out/one.sqz")) == before);
  EXPECT_EQ(build({"--levels", "1", "--update"}).last()["built"], 1);
  EXPECT_FALSE(read_all(path("out/one.sqz")) == before);
}

TEST_F(CorpusTest, ShardsHaveEveryDocumentOnce) {
  std::vector<std::string> lines;
  for (int i = 0; i < 12; ++i) lines.push_back(line(concat("k", i), "a"));
  write({"a"}, lines);
  int64_t built = build({"--shard", "0/3"}).last()["built"];
  EXPECT_GT(built, 0);
  EXPECT_LT(built, 12);
  const ToolRun slurm = build({"--shard", "auto"}, slurm_task(1, 3, 0, 2));
  EXPECT_EQ(slurm.last()["there"], 0);
  built += slurm.last()["built"].get<int64_t>();
  const ToolRun job = build({"--shard", "auto/3"}, {"JOB_COMPLETION_INDEX=2"});
  EXPECT_EQ(job.last()["there"], 0);
  EXPECT_EQ(built + job.last()["built"].get<int64_t>(), 12);
  EXPECT_EQ(outputs().size(), 12u);
}

// A task of a part of an array that is submitted again sees an array of its own.
TEST_F(CorpusTest, AutoTakesAnArrayOnlyIfItIsWhole) {
  write({"a"}, {line("one", "a")});
  const struct {
    int task, count, least, most;
  } unknown[] = {{3, 1, 3, 3}, {0, 1, 0, 0}, {5, 4, 4, 7}, {3, 3, 1, 7}, {4, 3, 0, 4}};
  for (const auto& [task, count, least, most] : unknown) {
    const ToolRun refused = build({"--shard", "auto"}, slurm_task(task, count, least, most));
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr(concat("from ", least, " to ", most)));
    EXPECT_THAT(refused.err, HasSubstr("pass auto/N"));
  }
  // With N it is the task's own number that counts.
  int64_t built = 0;
  for (const int task : {1, 3, 7}) {
    const ToolRun one = build({"--shard", "auto/8"}, slurm_task(task, 3, 1, 7));
    const ToolRun same = build({"--shard", concat(task, "/8")});
    EXPECT_EQ(one.last()["documents"], same.last()["documents"]);
    built += one.last()["documents"].get<int64_t>();
  }
  EXPECT_LE(built, 1);
  EXPECT_EQ(build({"--shard", "auto/8"}, slurm_task(8, 3, 1, 8)).code, 2);
}

TEST_F(CorpusTest, ASecondRunWithOtherOptionsIsRefused) {
  write_small_capture(path("a.h5"), 4000, 120);
  write_all(path("m.jsonl"), line("one", "a") + "\n");
  const std::string quick = concat(SQZ_INDEX_TOOL " build -qq --capture ", path("a.h5"), " -o ",
                                   path("out/one.sqz"), " --levels 1 >", path("log"));
  fs::create_directories(path("out"));
  // Writes the file while the other works.
  const auto overtake = [&](pid_t) { EXPECT_EQ(std::system(quick.c_str()), 0); };
  const ToolRun slow = build({"--iterations", "500", "--level-fractions", "0.3"}, {}, overtake);
  EXPECT_EQ(slow.code, 3);
  EXPECT_THAT(slow.err, HasSubstr("pass --update to replace it"));
  EXPECT_EQ(build({"--levels", "1"}).last()["there"], 1);
  EXPECT_EQ(outputs(), std::vector<std::string>{"one.sqz"});
}

TEST_F(CorpusTest, LinksThatLeadOutAreRefused) {
  write({"a"}, {line("in/one", "a"), line("out/two", "a"), line("three", "a")});
  fs::create_directories(path("out/real"));
  fs::create_directories(path("elsewhere"));
  write_all(path("elsewhere/x.sqz.tmp.resume"), "x");
  fs::create_directory_symlink("real", path("out/in"));
  fs::create_directory_symlink(path("elsewhere"), path("out/out"));
  fs::create_symlink(path("elsewhere/three.sqz"), path("out/three.sqz"));
  const ToolRun refused = build({"--update"});
  EXPECT_EQ(refused.code, 1);
  EXPECT_EQ(refused.last()["built"], 1);
  EXPECT_THAT(refused.err, HasSubstr("expected a place inside"));
  EXPECT_TRUE(fs::exists(path("out/real/one.sqz")));
  EXPECT_EQ(corpus("gc").code, 2);
  EXPECT_EQ(std::distance(fs::directory_iterator(path("elsewhere")), {}), 1);
}

TEST_F(CorpusTest, AFolderThatIsNotThereAndEndsWithASlash) {
  write({"a"}, {line("x/one", "a")});
  const ToolRun built = run(kTool, {"build", "--manifest", path("m.jsonl"), "-o", path("out/")});
  EXPECT_EQ(built.code, 0) << built.err;
  EXPECT_EQ(outputs(), std::vector<std::string>{"x/one.sqz"});
}

// Where a folder should be: nothing can be replaced, and --update is not advised.
TEST_F(CorpusTest, AFileInThePlaceOfAFolder) {
  write({"a"}, {line("x/one", "a")});
  write_all(path("out"), "mine");
  for (const char* option : {"--manifest", "--separate"}) {
    std::vector<std::string> arguments = {"build", "-o", path("out"), option};
    arguments.push_back(path(option == std::string("--manifest") ? "m.jsonl" : "a.txt"));
    const ToolRun refused = run(kTool, arguments);
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr("out: is a file; with --manifest or --separate"));
    EXPECT_EQ(read_all(path("out")), "mine");
  }
  fs::remove(path("out"));
  fs::create_directories(path("out"));
  write_all(path("out/x"), "mine");
  const ToolRun failed = build();
  EXPECT_EQ(failed.code, 3);
  EXPECT_THAT(failed.err, HasSubstr("out/x/one.sqz: open: Not a directory\n"));
}

TEST_F(CorpusTest, APartOfAnotherBuildIsBegunAnewWithUpdate) {
  const auto spoil = [](CaptureInfo&, CapturedLayer& data) {
    static int layer = 0;
    if (!data.keys.empty() && layer++ == 1) data.keys[0] = NAN;
  };
  write({"a"}, {line("one", "a")});
  const std::string good = read_all(path("a.h5"));
  write_small_capture(path("a.h5"), 600, 120, spoil);
  EXPECT_EQ(build({"--resume"}).code, 3);
  EXPECT_EQ(outputs(), std::vector<std::string>{"one.sqz.tmp.resume"});
  write_all(path("a.h5"), good);
  const ToolRun refused = build({"--resume", "--levels", "1"});
  EXPECT_EQ(refused.code, 3);
  EXPECT_THAT(refused.err,
              HasSubstr("build.level_fractions: found an array of 2, expected [0.05]"));
  EXPECT_THAT(refused.err, HasSubstr("sqz-index corpus gc"));
  EXPECT_EQ(build({"--resume", "--levels", "1", "--update"}).last()["built"], 1);
  EXPECT_EQ(outputs(), std::vector<std::string>{"one.sqz"});
}

TEST_F(CorpusTest, WhatIsWrongIsSaidBeforeAnythingIsBuilt) {
  const struct {
    std::vector<std::string> lines;
    std::string part;
  } cases[] = {
      {{line("a", "a"), "{\"key\": "}, "line 2: not valid JSON"},
      {{line("a", "a"), line("a", "a")}, "line 2: key: found 'a' of line 1 again"},
      {{line("a/../../b", "a")}, "line 1: key: found \"a/../../b\""},
      {{line("/a", "a")}, "line 1: key: found \"/a\""},
      {{line("", "a")}, "line 1: key: found \"\""},
      {{R"({"key": "a"})"}, "found 0 of them"},
      {{R"({"key": "a", "capture": "a.h5", "texts": ["a.md"]})"}, "found 2 of them"},
      {{R"({"key": "a", "texts": [1]})"}, "an array of paths"},
      {{}, "at least one"},
  };
  for (const auto& [lines, part] : cases) {
    write({"a"}, lines);
    const ToolRun refused = build();
    EXPECT_EQ(refused.code, 3) << part;
    EXPECT_THAT(refused.err, HasSubstr(part));
    EXPECT_FALSE(fs::exists(path("out")));
  }
  write({"a"}, {line("a", "a")});
  for (const auto& [shard, part] : {std::pair{"2/2", "found 2, expected 0 to 1"},
                                    {"x/2", "found 'x'"},
                                    {"1", "expected I/N or auto"},
                                    {"auto", "SLURM_ARRAY_TASK_ID is not set"}}) {
    const ToolRun refused = build({"--shard", shard});
    EXPECT_EQ(refused.code, 2) << shard;
    EXPECT_THAT(refused.err, HasSubstr(part));
  }
  EXPECT_EQ(run(kTool, {"build", "--capture", path("a.h5"), "-o", path("x"), "--update"}).code, 2);
}

// Nor those of other documents.
TEST_F(CorpusTest, CapturesAreNotReplacedByIndexes) {
  fs::create_directories(path("out"));
  write_small_capture(path("out/a.sqz"), 600, 120);
  const std::string before = read_all(path("out/a.sqz"));
  const std::string its = R"({"key": "a", "capture": "out/a.sqz"})";
  const std::string others = R"({"key": "b", "capture": "out/../out/a.sqz"})";
  for (const auto& lines : {std::vector{its}, std::vector{line("a", "a"), others}}) {
    write({"a"}, lines);
    for (const char* option : {"--force", "--update"}) {
      const ToolRun refused = build({option});
      EXPECT_EQ(refused.code, 2) << refused.err;
      EXPECT_THAT(refused.err, HasSubstr("a.sqz: is an input and the output"));
      EXPECT_TRUE(read_all(path("out/a.sqz")) == before);
    }
  }
}

TEST_F(CorpusTest, StatusFilesGrowAndAreDrawn) {
  write({"a"}, {line("x/one", "a"), line("lost", "none")});
  const std::vector<std::string> status = {"--status", path("status"), "--shard", "0/1"};
  EXPECT_EQ(build(status).code, 1);
  const std::string file = path("status/shard-0-of-1.jsonl");
  const std::string torn = R"({"key": "x/one", "sta)";
  write_all(file, read_all(file) + torn);  // as a kill may leave it
  EXPECT_EQ(build(status).code, 1);
  std::vector<std::string> states;
  std::istringstream lines(read_all(file));
  for (std::string text; std::getline(lines, text);) {
    if (text == torn) continue;
    const Json json = Json::parse(text);
    EXPECT_GT(json["time"], 1600000000);
    EXPECT_EQ(json.contains("build_id"), json["state"] != "failed");
    states.push_back(concat(std::string(json["key"]), " ", std::string(json["state"])));
  }
  std::sort(states.begin(), states.end());
  EXPECT_EQ(states,
            (std::vector<std::string>{"lost failed", "lost failed", "x/one built", "x/one there"}));
}

// What a full disk looks like, from the kernel itself: a write beyond RLIMIT_FSIZE.
TEST_F(CorpusTest, AFullDiskInTheMiddleFailsDocumentsAndLosesNone) {
  write_small_capture(path("large.h5"), 4000, 120);
  write_small_capture(path("a.h5"), 600, 120);
  write_all(path("m.jsonl"),
            line("one", "a") + "\n" + line("two", "large") + "\n" + line("three", "a") + "\n");
  const auto no_signal = ::signal(SIGXFSZ, SIG_IGN);
  const auto limit = [](pid_t worker) {
    const rlimit small = {1 << 20, 1 << 20};
    EXPECT_EQ(::prlimit(worker, RLIMIT_FSIZE, &small, nullptr), 0);
  };
  const ToolRun full = build({"--resume"}, {}, limit);
  ::signal(SIGXFSZ, no_signal);
  EXPECT_EQ(full.code, 1);
  EXPECT_EQ(full.last()["built"], 2);
  EXPECT_THAT(full.err, HasSubstr("line 2: two: "));
  EXPECT_THAT(full.err, HasSubstr("File too large"));
  const ToolRun again = build({"--resume"});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(again.last()["there"], 2);
  EXPECT_EQ(outputs(), (std::vector<std::string>{"one.sqz", "three.sqz", "two.sqz"}));
  expect_like_one_alone("two", "large");
}

#ifdef SQZ_WITH_TRAINING
TEST_F(CorpusTest, TextsAndTokensByOneModelThatIsLoadedOnce) {
  const std::string model = SQZ_SOURCE_DIR "/examples/models/nano";
  const std::string book = read_all(SQZ_SOURCE_DIR "/examples/texts/dracula.txt");
  std::string lines;
  for (int i = 0; i < 3; ++i) {
    write_all(path(concat(i, ".txt")), book.substr(static_cast<size_t>(10000 * i), 1500));
    lines += concat(R"({"key": "t)", i, R"(", "texts": [")", i, ".txt\"]}\n");
  }
  std::vector<int32_t> ids(300);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 97 + 5);
  ASSERT_TRUE(testing::write_npy_tokens(Env::posix(), path("ids.npy"), ids, false).ok());
  write_all(path("m.jsonl"), lines + R"({"key": "n", "tokens": "ids.npy"})" + "\n");
  const ToolRun first = build({"--model", model, "-v", "--together", "3"});
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(first.last()["built"], 4);
  EXPECT_EQ(first.err.find("loaded on cpu"), first.err.rfind("loaded on cpu"));
  EXPECT_THAT(first.err, HasSubstr("loaded on cpu"));
  const std::string alone = path("alone.sqz");
  for (const auto& [key, source] : {std::pair("t1", std::vector{path("1.txt")}),
                                    {"n", std::vector<std::string>{"--tokens", path("ids.npy")}}}) {
    std::vector<std::string> arguments = {"build", "--model", model, "-o", alone, "--force"};
    arguments.insert(arguments.end(), source.begin(), source.end());
    ASSERT_EQ(run(kTool, arguments).code, 0);
    EXPECT_TRUE(read_all(path(concat("out/", key, ".sqz"))) == read_all(alone)) << key;
  }
  const ToolRun second = build({"--model", model, "-v"});
  EXPECT_EQ(second.last()["there"], 4);
  EXPECT_EQ(second.err.find("loaded on cpu"), std::string::npos);
  const ToolRun other = build({"--model", model, "--run-dtype", "bf16"});
  EXPECT_EQ(other.code, 3);
  EXPECT_THAT(other.err, HasSubstr("build.pass: found nothing, expected \"bf16, cpu\""));
}
#endif

TEST_F(CorpusTest, KilledWorkersLeaveWholeIndexes) {
  std::vector<std::string> captures, lines;
  for (int i = 0; i < 8; ++i) {
    captures.push_back(concat("c", i));
    lines.push_back(line(concat("d", i % 3, "/", i), captures.back()));
  }
  write(captures, lines);
  for (int kill = 0; kill < 12; ++kill) {
    build({kill % 2 == 0 ? "--resume" : "--no-progress"}, {}, [&](pid_t worker) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20 + 15 * kill));
      ::kill(worker, SIGKILL);
    });
  }
  EXPECT_EQ(build().code, 0);
  EXPECT_EQ(corpus("gc").code, 0);
  EXPECT_EQ(outputs().size(), 8u);
  for (int i = 0; i < 8; ++i) {
    expect_like_one_alone(concat("d", i % 3, "/", i), captures[static_cast<size_t>(i)]);
  }
}

}  // namespace
}  // namespace sqz
