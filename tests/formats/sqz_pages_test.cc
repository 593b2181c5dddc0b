// Indexes of pages: what is written is read, what is malformed is refused at open.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "formats/sqz_file.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::RawIndex;

// 56 tokens between sink and tail: three pages of 16 and one of 8.
testing::TinyIndexOptions options() {
  testing::TinyIndexOptions o;
  o.page_size = 16;
  o.key_calibration = true;
  return o;
}

// The key of a token as the file should have it.
float key(const testing::TinyIndex& index, int64_t layer, int64_t head, int64_t token, int64_t c) {
  const auto& o = index.options;
  return index.layers[layer].keys[(head * o.tokens + token) * o.head_dim + c];
}

TEST(SqzPages, WhatIsWrittenIsRead) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    testing::TemporaryDirectory dir;
    auto o = options();
    o.dtype = dtype;
    o.dense_layers = {1};
    const auto written = testing::write_tiny_index(dir.file("x"), o);
    ASSERT_TRUE(written.ok()) << written.status().message();
    const auto file = SqzFile::open(dir.file("x"));
    ASSERT_TRUE(file.ok()) << file.status().message();
    EXPECT_EQ((*file)->metadata().partition, Partition::kPages);
    EXPECT_EQ((*file)->metadata().page_size, 16);
    EXPECT_EQ((*file)->metadata().levels, 0);
    EXPECT_TRUE((*file)->metadata().key_calibration);
    EXPECT_THAT((*file)->verify()->problems, IsEmpty());
    const auto calibration = (*file)->calibration();
    ASSERT_TRUE(calibration.ok()) << calibration.status().message();
    EXPECT_EQ(calibration->key_thresholds, written->calibration.key_thresholds);
    EXPECT_EQ(calibration->key_shares, written->calibration.key_shares);
    EXPECT_THAT(calibration->thresholds, IsEmpty());

    const LayerView dense = (*file)->layer(1);
    EXPECT_EQ(dense.pages, 0);
    EXPECT_EQ(dense.slots, 0);
    const LayerView view = (*file)->layer(0);
    ASSERT_EQ(view.pages, 4);
    EXPECT_EQ(view.page_size, 16);
    for (int64_t h = 0; h < o.kv_heads; ++h) {
      for (int64_t slot = 0; slot < view.slots; ++slot) {
        ASSERT_EQ(view.positions[h * view.slots + slot], o.sink + slot);
      }
      const auto at = [&](const void* data, int64_t page, int64_t c) {
        const int64_t i = (h * view.pages + page) * o.head_dim + c;
        return dtype == DType::kBF16 ? to_float(static_cast<const BFloat16*>(data)[i])
                                     : to_float(static_cast<const Float16*>(data)[i]);
      };
      for (int64_t page = 0; page < view.pages; ++page) {
        for (int64_t c = 0; c < o.head_dim; ++c) {
          float min = INFINITY, max = -INFINITY;
          for (int64_t s = page * 16; s < std::min<int64_t>(page * 16 + 16, view.slots); ++s) {
            min = std::min(min, key(*written, 0, h, o.sink + s, c));
            max = std::max(max, key(*written, 0, h, o.sink + s, c));
          }
          ASSERT_EQ(at(view.page_min, page, c), min) << page << " " << c;
          ASSERT_EQ(at(view.page_max, page, c), max) << page << " " << c;
        }
      }
    }
  }
}

struct Case {
  const char* name;
  std::function<void(RawIndex&)> change;
  std::vector<std::string> says;
};

Case pages_meta(const char* name, const char* key, const char* value,
                std::vector<std::string> says) {
  return {name, [=](RawIndex& index) { index.metadata[key] = value; }, std::move(says)};
}

Case reshape(const char* name, const char* tensor, const char* dtype, std::vector<int64_t> shape,
             std::vector<std::string> says) {
  return {name,
          [=](RawIndex& index) {
            index.at(tensor).dtype = dtype;
            index.at(tensor).shape = shape;
          },
          std::move(says)};
}

std::vector<Case> refused_at_open() {
  return {
      {"NoPageSize",
       [](RawIndex& index) { index.metadata.erase("page_size"); },
       {"page_size: found nothing"}},
      pages_meta("PageSizeZero", "page_size", "0", {"page_size: found 0"}),
      pages_meta("PageSizeNegative", "page_size", "-16", {"page_size: found -16"}),
      pages_meta("PageSizeHuge", "page_size", "1048577", {"page_size: found 1048577"}),
      pages_meta("PageSizeFraction", "page_size", "16.0", {"page_size: found 16.0", "an integer"}),
      pages_meta("PageSizeText", "page_size", "many", {"page_size", "not valid JSON"}),
      pages_meta("OtherPageSize", "page_size", "8",
                 {"layers.0.pages.min", "BF16[2, 4, 8]", "BF16[2, 7, 8]"}),
      pages_meta("Levels", "levels", "1", {"levels: found 1, expected 0: the partition is pages"}),
      pages_meta("ValueMeans", "value_means", "true", {"value_means: found true"}),
      pages_meta("SaidToBeClusters", "partition", "kmeans", {"levels: found 0"}),
      pages_meta("UnknownPartition", "partition", "tiles",
                 {"partition: found \"tiles\", expected \"kmeans\", \"pages\", \"pruned\" or "
                  "\"buckets\""}),
      pages_meta("KeyCalibrationDenied", "key_calibration", "false",
                 {"calibration.keys.thresholds"}),
      pages_meta("KeyCalibrationNotBoolean", "key_calibration", "yes",
                 {"key_calibration: found \"yes\""}),
      {"MinMissing",
       [](RawIndex& index) {
         index.tensors.erase(index.tensors.begin() +
                             static_cast<ptrdiff_t>(index.place("layers.0.pages.min")));
       },
       {"layers.0.pages.max", "expected tensor \"layers.0.pages.min\" here"}},
      {"MaxUnderAnotherName",
       [](RawIndex& index) { index.at("layers.1.pages.max").name = "layers.1.pages.top"; },
       {"layers.1.pages.top", "layers.1.pages.max"}},
      {"Swapped",
       [](RawIndex& index) {
         std::swap(index.at("layers.0.pages.min"), index.at("layers.0.pages.max"));
       },
       {"layers.0.pages.max", "layers.0.pages.min"}},
      reshape("MinOfOtherDType", "layers.0.pages.min", "F16", {2, 4, 8},
              {"layers.0.pages.min", "F16[2, 4, 8]", "BF16[2, 4, 8]"}),
      reshape("MaxTransposed", "layers.0.pages.max", "BF16", {4, 2, 8}, {"BF16[4, 2, 8]"}),
      reshape("MinFlat", "layers.0.pages.min", "BF16", {64}, {"BF16[64]"}),
      {"PageTooMany",
       [](RawIndex& index) {
         index.at("layers.0.pages.min").shape = {2, 8, 8};
         index.at("layers.0.pages.min").data.resize(2 * 8 * 8 * 2);
       },
       {"layers.0.pages.min", "BF16[2, 8, 8]", "BF16[2, 4, 8]"}},
      {"CentroidsBesidePages",
       [](RawIndex& index) {
         index.tensors.insert(
             index.tensors.begin(),
             {"layers.0.level.1.centroids", "BF16", {2, 2, 8}, std::string(64, '\0')});
       },
       {"layers.0.level.1.centroids"}},
      reshape("KeyThresholdsReshaped", "calibration.keys.thresholds", "F32", {1025, 2},
              {"calibration.keys.thresholds", "F32[1025, 2]", "F32[2, 1025]"}),
      {"PositionsMissing",
       [](RawIndex& index) { index.at("layers.0.positions").name = "layers.0.position"; },
       {"layers.0.positions"}},
  };
}

class SqzPagesMalformed : public ::testing::TestWithParam<Case> {};

TEST_P(SqzPagesMalformed, IsRefusedAtOpenByName) {
  testing::TemporaryDirectory dir;
  const std::string path = dir.file("x.sqz");
  ASSERT_TRUE(testing::write_tiny_index(path, options()).ok());
  RawIndex index = RawIndex::read(path);
  GetParam().change(index);
  testing::write_file(path, index.bytes());
  const auto file = SqzFile::open(path);
  ASSERT_FALSE(file.ok());
  const std::string message = file.status().message();
  EXPECT_EQ(file.status().code(), Code::kCorrupt) << message;
  EXPECT_THAT(message, ::testing::StartsWith(path + ": "));
  for (const std::string& part : GetParam().says) EXPECT_THAT(message, HasSubstr(part));
}

INSTANTIATE_TEST_SUITE_P(Pages, SqzPagesMalformed, ::testing::ValuesIn(refused_at_open()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace sqz
