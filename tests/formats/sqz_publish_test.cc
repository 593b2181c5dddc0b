// Publishing: whatever fails, and wherever the process dies, the final name holds the old file, the
// new one or none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "formats/sqz_file.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/formats/fault_env.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::ElementsAre;
using testing::FailNth;
using testing::FaultEnv;
using ::testing::HasSubstr;
using testing::TemporaryDirectory;
using testing::TinyIndexOptions;

// `unnamed`: on a file system with O_TMPFILE.
std::vector<std::string> calls_of_a_write(const std::string& path, bool unnamed) {
  FailNth count;
  FaultEnv env(count.hook(), unnamed);
  EXPECT_TRUE(testing::write_tiny_index(path, {}, env).ok());
  return count.calls;
}

TEST(SqzPublish, SyncsBeforeItGivesTheNameAndTheDirectoryAfter) {
  const auto expect = [](const TemporaryDirectory& dir, bool unnamed,
                         std::vector<std::string> ending) {
    std::vector<std::string> calls = calls_of_a_write(dir.file("x.sqz"), unnamed);
    const std::vector<std::string> last(calls.end() - std::ssize(ending), calls.end());
    EXPECT_EQ(last, ending);
    calls.resize(calls.size() - ending.size());
    ASSERT_GE(calls.size(), 2u);
    EXPECT_EQ(calls.front(), "create");
    for (size_t i = 1; i < calls.size(); ++i) EXPECT_EQ(calls[i], "write");
  };
  TemporaryDirectory unnamed, named;
  expect(unnamed, true, {"sync", "link", "close", "sync_directory"});
  expect(unnamed, true, {"sync", "link", "link", "rename", "close", "sync_directory"});
  for (int i = 0; i < 2; ++i) expect(named, false, {"sync", "rename", "close", "sync_directory"});
}

// A file system with room for less than the smallest index.
class FullEnv : public FaultEnv {
 public:
  FullEnv() : FaultEnv([](const std::string&) { return Status(); }) {}
  Status check_room(const std::string& path, uint64_t bytes) override {
    return bytes < 1000 ? Status() : Status(Code::kIo, path + ": needs more");
  }
};

TEST(SqzPublish, AFullFileSystemIsFoundBeforeTheWork) {
  TemporaryDirectory dir;
  FullEnv env;
  const auto refused = testing::write_tiny_index(dir.file("x.sqz"), {}, env);
  EXPECT_EQ(refused.status().message(), dir.file("x.sqz") + ": needs more");
  EXPECT_THAT(dir.names(), ::testing::IsEmpty());
}

class SqzPublishFaults : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Unnamed, SqzPublishFaults, ::testing::Bool());

TEST_P(SqzPublishFaults, AFailureAtAnyCallLeavesTheOldFileOrTheNewOne) {
  TinyIndexOptions other;
  other.seed = 2;
  for (const bool with_old : {false, true}) {
    TemporaryDirectory dir;
    const std::string path = dir.file("x.sqz");
    ASSERT_TRUE(testing::write_tiny_index(path, other).ok());
    const std::string whole = testing::read_file(path);
    if (!with_old) std::filesystem::remove(path);
    const std::vector<std::string> calls = calls_of_a_write(path, GetParam());
    const std::string old = testing::read_file(path);
    for (int nth = 0; nth < std::ssize(calls); ++nth) {
      if (!with_old) std::filesystem::remove(path);
      FailNth fail;
      fail.fail_at = nth;
      fail.failure = {Code::kIo, "x.sqz: write: No space left on device; free some space"};
      const std::string& call = calls[static_cast<size_t>(nth)];
      FaultEnv env(fail.hook(), GetParam());
      const auto result = testing::write_tiny_index(path, other, env, with_old);
      ASSERT_FALSE(result.ok()) << call;
      EXPECT_EQ(result.status().message(), fail.failure.message()) << "the cause is passed on";
      const bool published = testing::is_after_publishing(call);
      if (published) {
        EXPECT_EQ(testing::read_file(path), whole) << call;
        testing::write_file(path, old);
      } else if (with_old) {
        EXPECT_EQ(testing::read_file(path), old) << call;
      }
      if (published || with_old) {
        EXPECT_THAT(dir.names(), ElementsAre("x.sqz")) << call;
      } else {
        EXPECT_THAT(dir.names(), ::testing::IsEmpty()) << call;
      }
    }
    EXPECT_TRUE(testing::is_after_publishing(calls.back()));
  }
}

// Runs a build in a child that is killed at its n-th call. True if it was killed, false if the
// build came to its end before.
bool build_and_kill(const std::string& path, const TinyIndexOptions& options, int nth,
                    bool unnamed) {
  const pid_t child = ::fork();
  if (child == 0) {
    int call = 0;
    FaultEnv env(
        [&](const std::string&) {
          if (call++ == nth) ::kill(::getpid(), SIGKILL);
          return Status();
        },
        unnamed);
    const bool ok = testing::write_tiny_index(path, options, env).ok();
    ::_exit(ok ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  if (WIFSIGNALED(status)) return true;
  EXPECT_EQ(WEXITSTATUS(status), 0);
  return false;
}

TEST_P(SqzPublishFaults, AKillAtAnyStepLeavesTheOldOrTheNewFile) {
  for (const bool with_old : {false, true}) {
    TemporaryDirectory dir;
    const std::string path = dir.file("x.sqz");
    std::string old;
    if (with_old) {
      ASSERT_TRUE(testing::write_tiny_index(path).ok());
      old = testing::read_file(path);
    }
    TinyIndexOptions options;
    options.seed = 2;
    ASSERT_TRUE(testing::write_tiny_index(dir.file("new"), options).ok());
    const std::string whole = testing::read_file(dir.file("new"));

    int kills = 0;
    bool seen_new = false;
    while (build_and_kill(path, options, kills, GetParam())) {
      ++kills;
      const bool exists = std::filesystem::exists(path);
      ASSERT_TRUE(exists || !with_old) << "the old file is gone, killed at call " << kills;
      if (!exists) continue;
      const std::string found = testing::read_file(path);
      ASSERT_TRUE(found == whole || (with_old && found == old)) << "killed at call " << kills;
      seen_new = seen_new || found == whole;
    }
    EXPECT_GT(kills, 20);
    EXPECT_TRUE(seen_new) << "the last kill comes after the rename";
    EXPECT_EQ(testing::read_file(path), whole) << "and the build that was let through is whole";
  }
}

TEST(SqzPublish, AnExistingFileIsReplacedOnlyIfAsked) {
  TemporaryDirectory dir;
  const std::string path = dir.file("x.sqz");
  testing::write_file(path, "precious");
  const auto refused = testing::write_tiny_index(path, {}, Env::posix(), false);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kExists);
  EXPECT_EQ(testing::read_file(path), "precious");
  EXPECT_THAT(dir.names(), ElementsAre("x.sqz"));
  EXPECT_TRUE(testing::write_tiny_index(path, {}, Env::posix(), true).ok());
  EXPECT_TRUE(SqzFile::open(path).ok());
}

TEST(SqzPublish, AnAbandonedWriterLeavesNothing) {
  TemporaryDirectory dir;
  const auto index = testing::write_tiny_index(dir.file("good"));
  ASSERT_TRUE(index.ok());
  const auto good = SqzFile::open(dir.file("good"));
  {
    auto writer = SqzWriter::create(Env::posix(), dir.file("x.sqz"), false, index->metadata,
                                    ClusterCounts(2, index->options.clusters));
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->write_layer(0, (*good)->layer(0)).ok());
    EXPECT_THAT((*writer)->commit(index->calibration).status().message(), HasSubstr("layers.1."));
  }
  EXPECT_THAT(dir.names(), ElementsAre("good"));
}

// The caller's mistakes, each found before it can reach a reader.
TEST(SqzWriterMistakes, AreNamed) {
  TemporaryDirectory dir;
  const auto index = testing::write_tiny_index(dir.file("good"));
  ASSERT_TRUE(index.ok());
  const auto good = SqzFile::open(dir.file("good"));
  const ClusterCounts clusters(2, index->options.clusters);
  const auto create = [&](const IndexMetadata& metadata, const ClusterCounts& counts) {
    return SqzWriter::create(Env::posix(), dir.file("x"), false, metadata, counts);
  };
  const auto refused = [&](const IndexMetadata& metadata, const ClusterCounts& counts,
                           const char* field) {
    const Status status = create(metadata, counts).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(field));
  };
  refused(index->metadata, {{3, 9}}, "layers");
  refused(index->metadata, {{3}, {3, 9}}, "layers.0");
  refused(index->metadata, {{3, 9}, {10, 9}}, "layers.1: clusters");
  refused(index->metadata, {{0, 9}, {3, 9}}, "layers.0: clusters");
  refused(index->metadata, {{3, 9}, {3, 57}}, "layers.1: clusters");
  IndexMetadata wrong = index->metadata;
  wrong.tail = 62;
  refused(wrong, clusters, "tokens");
  wrong = index->metadata;
  wrong.tokens_hash = "not a hash";
  refused(wrong, clusters, "tokens_hash");
  EXPECT_EQ(
      SqzWriter::create(Env::posix(), dir.file("no/folder/x"), false, index->metadata, clusters)
          .status()
          .code(),
      Code::kNotFound);

  const auto write = [&](int64_t layer, const auto& change) {
    LayerView view = (*good)->layer(0);
    change(view);
    auto writer = create(index->metadata, clusters);
    Status status = (*writer)->write_layer(layer, view);
    if (status.ok()) status = (*writer)->write_layer(layer, view);  // once more
    EXPECT_EQ(status.code(), Code::kInternal);
    return status.message();
  };
  EXPECT_THAT(write(2, [](LayerView&) {}), HasSubstr("layers.2.level.1.centroids"));
  EXPECT_THAT(write(0, [](LayerView&) {}), HasSubstr("layers.0.level.1.centroids"));
  EXPECT_THAT(write(0, [](LayerView& v) { v.values = nullptr; }), HasSubstr("layers.0.values"));
  EXPECT_THAT(write(0, [](LayerView& v) { v.level[1].clusters = 8; }),
              HasSubstr("layers.0.level.2.centroids"));

  const auto commit = [&](const auto& change) {
    auto fresh = create(index->metadata, clusters);
    for (const int64_t l : {0, 1}) EXPECT_TRUE((*fresh)->write_layer(l, (*good)->layer(l)).ok());
    Calibration calibration = index->calibration;
    change(calibration);
    return (*fresh)->commit(calibration).status();
  };
  EXPECT_THAT(commit([](Calibration& c) { c.shares.pop_back(); }).message(),
              HasSubstr("calibration.shares"));
  EXPECT_THAT(commit([](Calibration& c) { c.thresholds[4] = NAN; }).message(),
              HasSubstr("calibration.thresholds[4]"));
  EXPECT_EQ(commit([](Calibration& c) { c.source = std::string(100000, 's'); }).code(),
            Code::kInvalidArgument);
  EXPECT_THAT(dir.names(), ::testing::Each(::testing::StartsWith("good")));
}

}  // namespace
}  // namespace sqz
