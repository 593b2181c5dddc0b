// Publishing: whatever fails, the final name holds the old file, the new one or none.
// (fault_tool_test of the tools kills builds.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
    ASSERT_GE(calls.size(), 3u);
    EXPECT_EQ(calls[0], "create");
    EXPECT_EQ(calls[1], "check_room");
    for (size_t i = 2; i < calls.size(); ++i) EXPECT_EQ(calls[i], "write");
  };
  TemporaryDirectory unnamed, named;
  expect(unnamed, true, {"sync", "link", "close", "sync_directory"});
  expect(unnamed, true, {"sync", "link", "link", "rename", "close", "sync_directory"});
  for (int i = 0; i < 2; ++i) expect(named, false, {"sync", "rename", "close", "sync_directory"});
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
  const auto refused = [&](const ClusterCounts& counts, int64_t tail, const char* field) {
    IndexMetadata metadata = index->metadata;
    metadata.tail = tail;
    const Status status = create(metadata, counts).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(field));
  };
  refused({{3, 9}}, 6, "layers");
  refused({{3}, {3, 9}}, 6, "layers.0");
  refused({{3, 9}, {10, 9}}, 6, "layers.1: clusters");
  refused({{0, 9}, {3, 9}}, 6, "layers.0: clusters");
  refused({{3, 9}, {3, 57}}, 6, "layers.1: clusters");
  refused(clusters, 62, "tokens");
  IndexMetadata longest = index->metadata;
  longest.tokens = UINT32_MAX;  // slots are counted in 32 bits
  EXPECT_TRUE(SqzWriter::planned_bytes(longest, clusters).ok());
  ++longest.tokens;
  EXPECT_THAT(SqzWriter::planned_bytes(longest, clusters).status().message(),
              HasSubstr("tokens: found 4294967296, expected an integer in [1, 4294967295]"));

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

  const auto commit = [&](const auto& change, std::vector<int64_t> layers = {0, 1}) {
    auto fresh = create(index->metadata, clusters);
    for (const int64_t l : layers) EXPECT_TRUE((*fresh)->write_layer(l, (*good)->layer(l)).ok());
    Calibration calibration = index->calibration;
    change(calibration);
    return (*fresh)->commit(calibration).status();
  };
  EXPECT_THAT(commit([](Calibration&) {}, {0}).message(), HasSubstr("layers.1."));
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
