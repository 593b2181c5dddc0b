// Data written to a .sqz file comes back, and the file is laid out as docs/format.md promises.
#include "formats/sqz_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "formats/sqz_writer.h"
#include "tests/common/must.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/formats/fault_env.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using testing::RawIndex;
using testing::TemporaryDirectory;
using testing::TinyIndex;
using testing::TinyIndexOptions;

struct Case {
  const char* name;
  TinyIndexOptions options;
};

std::vector<Case> cases() {
  const auto with = [](auto change) {
    TinyIndexOptions options;
    change(options);
    return options;
  };
  using O = TinyIndexOptions;
  return {{"TwoLevels", O{}},
          {"OneLevelF16", with([](O& o) { o.clusters = {5}, o.dtype = DType::kF16; })},
          {"FourLevels", with([](O& o) {
             o.clusters = {1, 4, 4, 20};
           })},
          {"NoValueMeans", with([](O& o) { o.has_value_means = false; })},
          {"Pages", with([](O& o) {
             o.layers = 3, o.page_size = 16, o.dense_layers = {1}, o.layer_budgets = {9, 31, 20};
             o.heavy_hitters = true;
           })},
          {"DenseAndWindows", with([](O& o) {
             o.layers = 4, o.dense_layers = {0}, o.windows = {{2, 10}, {3, 1000}};
           })},
          {"AllDense", with([](O& o) {
             o.dense_layers = {0, 1};
           })},
          {"NoSinkNoTail", with([](O& o) { o.sink = 0, o.tail = 0; })},
          {"OneKeyAHeadAndCluster", with([](O& o) {
             o.tokens = 3, o.sink = 1, o.tail = 1, o.clusters = {1}, o.kv_heads = 1, o.head_dim = 1;
             o.query_heads = 1;
           })},
          {"OddShapes", with([](O& o) {
             o.tokens = 77, o.head_dim = 3, o.kv_heads = 3, o.query_heads = 9, o.clusters = {7, 13};
           })}};
}

class SqzFileRoundTrip : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { index_ = must(testing::write_tiny_index(path_, GetParam().options)); }

  TemporaryDirectory dir_;
  std::string path_ = dir_.file("x.sqz");
  TinyIndex index_;
};

TEST_P(SqzFileRoundTrip, MetadataAndCalibrationComeBack) {
  const auto file = must(SqzFile::open(path_));
  index_.metadata.producer = producer_name();
  EXPECT_EQ(metadata_to_strings(file->metadata()), metadata_to_strings(index_.metadata));
  EXPECT_EQ(file->file_bytes(), index_.bytes);
  EXPECT_EQ(file->path(), path_);
  const auto found = must(file->calibration());
  const Calibration& want = index_.calibration;
  EXPECT_EQ(calibration_text(found), calibration_text(want));
  EXPECT_EQ(found.thresholds, want.thresholds);
  EXPECT_EQ(found.coarse, want.coarse);
  EXPECT_EQ(found.shares, want.shares);
}

// Every tensor is found through its pointer: the layers in another order make the same file.
TEST_P(SqzFileRoundTrip, ACopyOfTheViewsHasTheSameBytes) {
  const auto file = must(SqzFile::open(path_));
  ClusterCounts clusters;
  for (const TinyIndex::Layer& layer : index_.layers) clusters.push_back(layer.shape.clusters);
  EXPECT_EQ(SqzWriter::planned_bytes(index_.metadata, clusters).value(), index_.bytes);
  auto writer =
      must(SqzWriter::create(Env::posix(), dir_.file("copy"), false, index_.metadata, clusters));
  for (int64_t l = std::ssize(clusters); l-- > 0;) {
    must(writer->write_layer(l, file->layer(l)));
  }
  ASSERT_TRUE(writer->commit(index_.calibration).ok());
  EXPECT_TRUE(testing::read_file(path_) == testing::read_file(dir_.file("copy")));
}

TEST_P(SqzFileRoundTrip, VerifyFindsNothingAndReportsProgress) {
  const auto file = must(SqzFile::open(path_));
  uint64_t last = 0;
  const Status verified = file->verify([&](uint64_t done, uint64_t total) {
    EXPECT_GE(done, last);
    EXPECT_EQ(total, index_.bytes);
    last = done;
  });
  EXPECT_EQ(verified.message(), "");
  uint64_t hashed = 0;
  for (const TensorInfo& tensor : file->header().tensors) {
    hashed += tensor.name == kHeaderHashName ? 0 : tensor.bytes;
  }
  EXPECT_EQ(last, hashed);
}

INSTANTIATE_TEST_SUITE_P(All, SqzFileRoundTrip, ::testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name; });

TEST(SqzFile, MissingFileAndFailedCallsAreErrors) {
  TemporaryDirectory dir;
  const std::string path = dir.file("x.sqz");
  EXPECT_EQ(SqzFile::open(path).status().code(), Code::kNotFound);
  ASSERT_TRUE(testing::write_tiny_index(path).ok());
  for (const OpenMode mode : {OpenMode::kMmap, OpenMode::kRead}) {
    testing::FailNth count;
    testing::FaultEnv counting(count.hook());
    ASSERT_TRUE(SqzFile::open(path, mode, counting).ok());
    const std::vector<std::string> mapped = {"open", "map"};
    const std::vector<std::string> read = {"open", "read", "read", "read",
                                           "read"};  // start, header
    EXPECT_EQ(count.calls, mode == OpenMode::kMmap ? mapped : read);
    for (int nth = 0; nth < static_cast<int>(count.calls.size()); ++nth) {
      testing::FailNth fail;
      fail.fail_at = nth;
      testing::FaultEnv env(fail.hook());
      EXPECT_EQ(SqzFile::open(path, mode, env).status().code(), Code::kIo) << nth;
    }
  }
}

TEST(SqzFile, AForeignFileIsRefusedBeforeItIsReadWhole) {
  TemporaryDirectory dir;
  std::ofstream(dir.file("video")) << "no index begins so";
  std::filesystem::resize_file(dir.file("video"), uint64_t{1} << 40);  // sparse
  const Status refused = SqzFile::open(dir.file("video"), OpenMode::kRead).status();
  EXPECT_EQ(refused.code(), Code::kCorrupt);
  EXPECT_THAT(refused.message(), HasSubstr("not an index"));
}

TEST(SqzFile, CopiesBytesOfTensors) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("tiny.sqz");
  ASSERT_TRUE(testing::write_tiny_index(path).ok());
  for (const OpenMode mode : {OpenMode::kMmap, OpenMode::kRead}) {
    const auto file = must(SqzFile::open(path, mode));
    const auto tensor = file->tensor("layers.1.keys");
    ASSERT_GT(tensor.size(), 40u);
    std::vector<std::byte> part(33);
    ASSERT_TRUE(file->copy(tensor.data() + 7, part).ok());
    EXPECT_THAT(part, ElementsAreArray(tensor.subspan(7, 33)));
  }
  // A mapped file that was cut gives an error and no SIGBUS.
  const auto file = must(SqzFile::open(path));
  std::filesystem::resize_file(path, file->header().data_offset);
  std::vector<std::byte> part(33);
  EXPECT_EQ(file->copy(file->tensor("layers.1.keys").data(), part).code(), Code::kCorrupt);
}

}  // namespace
}  // namespace sqz
