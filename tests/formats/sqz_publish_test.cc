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
  {
    auto writer = SqzWriter::create(Env::posix(), dir.file("x.sqz"), false, index->metadata,
                                    {index->layers[0].shape, index->layers[1].shape});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(testing::tiny::write_layer(**writer, index->options, 0, index->layers[0]).ok());
    EXPECT_THAT((*writer)->commit(index->calibration).status().message(),
                HasSubstr("layer 1 was not written"));
  }
  EXPECT_THAT(dir.names(), ElementsAre("good"));
}

// The caller's mistakes, each found before it can reach a reader.
class SqzWriterMistakes : public ::testing::Test {
 protected:
  void SetUp() override {
    auto index = testing::write_tiny_index(dir_.file("good"));
    ASSERT_TRUE(index.ok());
    index_ = *std::move(index);
    shapes_ = {index_.layers[0].shape, index_.layers[1].shape};
  }
  Status create() {
    return SqzWriter::create(Env::posix(), dir_.file("x"), false, index_.metadata, shapes_)
        .status();
  }
  void expect_refused(const std::string& says) {
    const Status status = create();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(says));
    EXPECT_THAT(dir_.names(), ElementsAre("good"));
  }

  TemporaryDirectory dir_;
  testing::TinyIndex index_;
  std::vector<LayerShape> shapes_;
};

TEST_F(SqzWriterMistakes, TooFewShapes) {
  shapes_.pop_back();
  expect_refused("layers: found 1 shapes, expected 2");
}
TEST_F(SqzWriterMistakes, WrongSlots) {
  shapes_[1].slots = 55;
  expect_refused("layers.1: found 55 slots, expected 56");
}
TEST_F(SqzWriterMistakes, WrongExact) {
  shapes_[1].exact = 9;
  expect_refused("layers.1: found 9 exact keys, expected 8");
}
TEST_F(SqzWriterMistakes, WrongLevels) {
  shapes_[0].clusters = {3};
  expect_refused("layers.0: found 1 levels, expected 2");
}
TEST_F(SqzWriterMistakes, CoarserLevelWithMoreClusters) {
  shapes_[0].clusters = {10, 9};
  expect_refused("layers.0: clusters: found 9, expected at least 10");
}
TEST_F(SqzWriterMistakes, NoClusters) {
  shapes_[0].clusters = {0, 9};
  expect_refused("found 0, expected at least 1");
}
TEST_F(SqzWriterMistakes, SinkAndTailTakeAll) {
  index_.metadata.tail = 62;
  expect_refused("more than sink and tail");
}
TEST_F(SqzWriterMistakes, BadHash) {
  index_.metadata.tokens_hash = "not a hash";
  expect_refused("tokens_hash");
}
TEST_F(SqzWriterMistakes, UnwritableFolder) {
  const Status status = SqzWriter::create(Env::posix(), dir_.file("no/such/folder/x"), false,
                                          index_.metadata, shapes_)
                            .status();
  EXPECT_EQ(status.code(), Code::kNotFound);
}

TEST_F(SqzWriterMistakes, LayerOfTheWrongSizeOrTwice) {
  auto writer = SqzWriter::create(Env::posix(), dir_.file("x"), false, index_.metadata, shapes_);
  ASSERT_TRUE(writer.ok());
  LayerData empty;
  EXPECT_EQ((*writer)->write_layer(2, empty).code(), Code::kInternal);
  EXPECT_EQ((*writer)->write_layer(-1, empty).code(), Code::kInternal);
  EXPECT_THAT((*writer)->write_layer(0, empty).message(), HasSubstr("0 levels, expected 2"));
  empty.levels.resize(2);
  EXPECT_THAT((*writer)->write_layer(0, empty).message(),
              HasSubstr("layers.0.level.1.centroids: found 0 bytes, expected 96"));
  ASSERT_TRUE(testing::tiny::write_layer(**writer, index_.options, 0, index_.layers[0]).ok());
  EXPECT_THAT(testing::tiny::write_layer(**writer, index_.options, 0, index_.layers[0]).message(),
              HasSubstr("was written before"));
}

TEST_F(SqzWriterMistakes, CalibrationOfTheWrongShapeOrWithNan) {
  const auto commit = [&](const Calibration& calibration) {
    auto writer = SqzWriter::create(Env::posix(), dir_.file("x"), false, index_.metadata, shapes_);
    EXPECT_TRUE(writer.ok());
    for (const int64_t l : {0, 1}) {
      EXPECT_TRUE(testing::tiny::write_layer(**writer, index_.options, l,
                                             index_.layers[static_cast<size_t>(l)])
                      .ok());
    }
    return (*writer)->commit(calibration).status();
  };
  Calibration wrong = index_.calibration;
  wrong.shares.pop_back();
  EXPECT_THAT(commit(wrong).message(), HasSubstr("calibration.shares: found 8199 values"));
  wrong = index_.calibration;
  wrong.thresholds[4] = NAN;
  EXPECT_THAT(commit(wrong).message(), HasSubstr("calibration.thresholds[4]"));
  wrong = index_.calibration;
  wrong.source = std::string(100000, 's');
  EXPECT_EQ(commit(wrong).code(), Code::kInvalidArgument);
  EXPECT_THAT(dir_.names(), ElementsAre("good"));
}

}  // namespace
}  // namespace sqz
