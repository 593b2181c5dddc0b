// sqz-index build --manifest.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <thread>

#include "tests/tools/run_tool.h"
#include "tests/tools/small_capture.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;
using Words = std::vector<std::string>;

class CorpusTest : public ToolTest {
 protected:
  // NAME.h5 for each, and a manifest of the lines.
  void write(const Words& captures, const Words& lines) {
    for (size_t i = 0; i < captures.size(); ++i) {
      write_small_capture(path(captures[i] + ".h5"), 600 + 8 * static_cast<int64_t>(i), 120);
    }
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    write_file(path("m.jsonl"), text);
  }
  static std::string line(const std::string& key, const std::string& capture) {
    return R"({"key": ")" + key + R"(", "capture": ")" + capture + R"(.h5"})";
  }
  ToolRun build(const std::string& more = "",
                const std::function<void(pid_t)>& while_running = {}) {
    return run("sqz-index", words_of("build --manifest m.jsonl -o out --json " + more), "", {},
               while_running);
  }
  void expect_counts(const ToolRun& result, int code, int built, int there, int failed) {
    EXPECT_EQ(result.code, code) << result.err;
    const Json last = result.last();
    EXPECT_EQ(last["built"], built);
    EXPECT_EQ(last["there"], there);
    EXPECT_EQ(last["failed"], failed);
  }
  // As an index of that source alone.
  void expect_like_one_alone(const std::string& key, const std::string& source) {
    expect({"sqz-index build -o alone.sqz --force " + source});
    EXPECT_TRUE(read_file(path("out/" + key + ".sqz")) == read_file(path("alone.sqz"))) << key;
  }
  Words outputs() const {
    Words out;
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
  const ToolRun plan = build("--dry-run");
  EXPECT_EQ(plan.code, 1);
  EXPECT_FALSE(fs::exists(path("out")));

  const ToolRun first = build();
  expect_counts(first, 1, 2, 0, 1);
  EXPECT_THAT(first.err, HasSubstr("line 2: lost: "));
  std::map<std::string, Json> events;
  for (const Json& event : first.events()) {
    if (event["event"] == "document") events[event["key"]] = event;
  }
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events["x/one"]["state"], "built");
  EXPECT_EQ(events["x/one"]["tokens"], 600);
  EXPECT_EQ(events["lost"]["code"], "not found");
  EXPECT_EQ(outputs(), (Words{"two.sqz", "x/one.sqz"}));
  EXPECT_EQ(plan.last()["indexes"], 2);
  EXPECT_EQ(plan.last()["tokens"], 1208);
  EXPECT_EQ(plan.last()["bytes"],
            fs::file_size(path("out/two.sqz")) + fs::file_size(path("out/x/one.sqz")));
  expect_like_one_alone("x/one", "--capture a.h5");
  expect_like_one_alone("two", "--capture b.h5");

  write_small_capture(path("none.h5"), 600, 120);
  expect_counts(build(), 0, 1, 2, 0);
  EXPECT_EQ(build("--dry-run").last()["indexes"], 0) << "nothing is left to do";
}

TEST_F(CorpusTest, OtherOptionsAreRefusedUntilToldTo) {
  write({"a"}, {line("one", "a")});
  ASSERT_EQ(build().code, 0);
  const std::string before = read_file(path("out/one.sqz"));
  const ToolRun other = build("--levels 1");
  EXPECT_EQ(other.code, 3);
  EXPECT_THAT(other.err, HasSubstr("build.level_fractions"));
  EXPECT_THAT(other.err, HasSubstr("--force"));
  EXPECT_TRUE(read_file(path("out/one.sqz")) == before);
  expect_counts(build("--levels 1 --force"), 0, 1, 0, 0);
  EXPECT_FALSE(read_file(path("out/one.sqz")) == before);
}

TEST_F(CorpusTest, ShardsHaveEveryDocumentOnce) {
  Words lines;
  for (int i = 0; i < 12; ++i) lines.push_back(line(concat("k", i), "a"));
  write({"a"}, lines);
  int64_t built = 0;
  for (const char* shard : {"0/3", "1/3", "2/3"}) {
    const Json result = build(concat("--shard ", shard)).last();
    EXPECT_EQ(result["there"], 0);
    EXPECT_LT(result["built"], 12);
    built += result["built"].get<int64_t>();
  }
  EXPECT_EQ(built, 12);
  EXPECT_EQ(outputs().size(), 12u);
  for (const char* shard : {"2/2", "x/2", "1", "-1/2", "0/0"}) {
    EXPECT_EQ(build(concat("--shard ", shard)).code, 2) << shard;
  }
}

TEST_F(CorpusTest, OfTwoRunsWithOtherOptionsTheSecondIsRefused) {
  write_small_capture(path("a.h5"), 4000, 120);
  write_file(path("m.jsonl"), line("one", "a") + "\n");
  const std::string quick = concat(SQZ_INDEX_TOOL " build -qq --capture ", path("a.h5"), " -o ",
                                   path("out/one.sqz"), " --levels 1 >", path("log"));
  fs::create_directories(path("out"));
  // Writes the file while the other works.
  const auto overtake = [&](pid_t) { EXPECT_EQ(std::system(quick.c_str()), 0); };
  const ToolRun slow = build("--iterations 500 --level-fractions 0.3", overtake);
  EXPECT_EQ(slow.code, 3);
  EXPECT_THAT(slow.err, HasSubstr("--force"));
  expect_counts(build("--levels 1"), 0, 0, 1, 0);
  EXPECT_EQ(outputs(), Words{"one.sqz"});
}

TEST_F(CorpusTest, WhatIsWrongIsSaidBeforeAnythingIsBuilt) {
  const struct {
    Words lines;
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
  write({"a"}, {line("x/a", "a")});
  EXPECT_EQ(build("--capture a.h5").code, 2);
  fs::create_directories(path("out"));
  write_file(path("out/x"), "mine");  // where a folder should be
  EXPECT_EQ(build("--force").code, 3);
  EXPECT_EQ(read_file(path("out/x")), "mine");
}

// A write beyond RLIMIT_FSIZE fails in the kernel, as on a full disk.
TEST_F(CorpusTest, AFullDiskInTheMiddleFailsDocumentsAndLosesNone) {
  write_small_capture(path("large.h5"), 4000, 120);
  write({"a"}, {line("one", "a"), line("two", "large"), line("three", "a")});
  const auto limit = [](pid_t worker) {
    const rlimit small = {1 << 20, 1 << 20};
    EXPECT_EQ(::prlimit(worker, RLIMIT_FSIZE, &small, nullptr), 0);
  };
  const ToolRun full = build("", limit);
  expect_counts(full, 1, 2, 0, 1);
  EXPECT_THAT(full.err, HasSubstr("File too large"));
  expect_counts(build(), 0, 1, 2, 0);
}

#ifdef SQZ_WITH_TRAINING
TEST_F(CorpusTest, TextsAndTokensByOneModelThatIsLoadedOnce) {
  const std::string book = read_file(SQZ_SOURCE_DIR "/examples/texts/dracula.txt");
  std::string lines;
  for (int i = 0; i < 3; ++i) {
    write_file(path(concat(i, ".txt")), book.substr(static_cast<size_t>(10000 * i), 1500));
    lines += concat(R"({"key": "t)", i, R"(", "texts": [")", i, ".txt\"]}\n");
  }
  std::vector<int32_t> ids(300);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 97 + 5);
  write_ids("a.ids", ids);
  write_file(path("m.jsonl"), lines + R"({"key": "n", "tokens": "a.ids"})" + "\n");
  const ToolRun first = build("-m $MODEL -v");
  expect_counts(first, 0, 4, 0, 0);
  EXPECT_THAT(first.err, HasSubstr("loaded on cpu"));
  EXPECT_EQ(first.err.find("loaded on cpu"), first.err.rfind("loaded on cpu"));
  expect_like_one_alone("t1", "-m $MODEL 1.txt");
  expect_like_one_alone("n", "-m $MODEL --tokens a.ids");
  const ToolRun second = build("-m $MODEL -v");
  expect_counts(second, 0, 0, 4, 0);
  EXPECT_EQ(second.err.find("loaded on cpu"), std::string::npos);
  const ToolRun other = build("-m $MODEL --run-dtype bf16");
  EXPECT_EQ(other.code, 3);
  EXPECT_THAT(other.err, HasSubstr("build.pass: found nothing, expected \"bf16, cpu\""));
}
#endif

}  // namespace
}  // namespace sqz
