// verify() finds contents that were wrong before the checksums were taken.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "formats/sqz_container.h"
#include "formats/sqz_file.h"
#include "tests/common/check_index.h"
#include "tests/common/must.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_buckets.h"
#include "tests/common/tiny_index.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::RawIndex;
using testing::TemporaryDirectory;
using testing::TinyIndexOptions;

// One element of a tensor that was wrong before the checksums were taken; `field` is in the report.
struct Wrong {
  const char* file;  // of make_files()
  const char* tensor;
  size_t at;
  double value;
  const char* field;
};

// The tiny index has 2 layers, 2 KV heads, d = 8, 56 slots (tokens 2 .. 57), 3 and 9 clusters.
const Wrong kWrong[] = {
    {"tree", "layers.0.positions", 56 + 3, 1, "layers.0.positions: head 1, entry 3"},
    {"tree", "layers.0.positions", 4, 30, "layers.0.positions: head 0, entry"},
    {"tree", "layers.0.positions", 0, 58, "layers.0.positions: head 0, entry 0"},
    {"tree", "layers.0.positions", 5, UINT32_MAX, "layers.0.positions: head 0, entry 5"},
    {"tree", "layers.0.level.2.offsets", 0, 1, "layers.0.level.2.offsets: head 0, entry 0"},
    {"tree", "layers.0.level.2.offsets", 10 + 4, 0, "layers.0.level.2.offsets: head 1, entry 4"},
    {"tree", "layers.0.level.2.offsets", 9, 57, "layers.0.level.2.offsets: head 0, entry 9"},
    {"tree", "layers.1.level.2.offsets", 9, 55, "layers.1.level.2.offsets: head 0, entry 9"},
    {"tree", "layers.0.level.1.offsets", 3, 10, "layers.0.level.1.offsets: head 0, entry 3"},
    {"tree", "layers.0.level.1.offsets", 1, UINT32_MAX, "layers.0.level.1.offsets: head 0"},
    {"tree", "layers.1.keys", 100, NAN, "\"layers.1.keys\""},
    {"tree", "layers.1.keys", 17, INFINITY, "\"layers.1.keys\""},
    {"tree", "layers.0.level.1.value_means", 3, NAN, "\"layers.0.level.1.value_means\""},
    {"tree", "padding.0", 3, 'x', "\"padding.0\""},
    {"tree", "calibration.thresholds", 1025 + 7, 2, "calibration.thresholds[1032]"},
    {"tree", "calibration.thresholds", 0, NAN, "calibration.thresholds[0]"},
    {"tree", "calibration.thresholds", 2050, INFINITY, "calibration.thresholds[2050]"},
    {"tree", "calibration.coarse", 0, NAN, "calibration.coarse[0]"},
    {"tree", "calibration.shares", 9, 1.5, "calibration.shares[9]"},
    {"tree", "calibration.shares", 9, -0.25, "calibration.shares[9]"},
    {"pages", "layers.0.positions", 0, 3, "layers.0.positions: head 0"},
    {"pages", "layers.1.heavy", 0, 56, "layers.1.heavy: head 0, entry 0"},
    {"buckets", "layers.1.buckets.offsets", 1, 200, "layers.1.buckets.offsets: head 0, entry"},
    {"buckets", "layers.1.buckets.offsets", 0, 1, "layers.1.buckets.offsets: head 0, entry 0"},
    {"buckets", "layers.1.buckets.hidden.bias", 1, NAN, "\"layers.1.buckets.hidden.bias\""},
    {"q8", "layers.0.keys.scales", 3, -1, "layers.0.keys.scales: head 0, entry 3"},
    {"q8", "layers.0.values.scales", 4, -1, "layers.0.values.scales: head 0, entry 4"},
};

// Contents that scripts/check_index.py alone recomputes.
const Wrong kWrongMeans[] = {
    {"tree", "layers.0.level.2.centroids", (9 + 2) * 8 + 5, 10, "layers.0.level.2.centroids"},
    {"tree", "layers.1.level.1.centroids", 8, -10, "layers.1.level.1.centroids"},
    {"tree", "layers.0.level.2.value_means", 0, 10, "layers.0.level.2.value_means"},
    {"pages", "layers.0.pages.min", 9, 2, "layers.0.pages"},
    {"pages", "layers.1.pages.max", 5, 3, "layers.1.pages"},
};

std::string write_wrong(const TemporaryDirectory& dir, const Wrong& wrong, size_t number) {
  RawIndex index = RawIndex::read(dir.file(concat(wrong.file, ".sqz")));
  index.set_number(wrong.tensor, wrong.at, wrong.value);
  index.fix_checksums();
  const std::string name = concat("wrong", number);
  testing::write_file(dir.file(name), index.bytes());
  return name;
}

class SqzVerify : public ::testing::Test {
 protected:
  void SetUp() override {
    TinyIndexOptions pages;
    pages.page_size = 16;
    pages.heavy_hitters = true;
    ASSERT_TRUE(testing::write_tiny_index(dir_.file("tree.sqz")).ok());
    ASSERT_TRUE(testing::write_tiny_index(dir_.file("pages.sqz"), pages).ok());
    must(testing::write_tiny_buckets(dir_.file("buckets.sqz"), testing::tiny_qmodel(), 132));
    std::filesystem::copy(SQZ_SOURCE_DIR "/tests/fuzz/seeds/sqz_file_fuzz/q8.sqz",
                          dir_.file("q8.sqz"));
  }
  std::string problem_of(const std::string& name) {
    return must(SqzFile::open(dir_.file(name)))->verify().message();
  }
  TemporaryDirectory dir_;
};

TEST_F(SqzVerify, NamesTheTensorThatIsWrong) {
  for (size_t i = 0; i < std::size(kWrong); ++i) {
    EXPECT_THAT(problem_of(write_wrong(dir_, kWrong[i], i)), HasSubstr(kWrong[i].field));
  }
}

TEST_F(SqzVerify, SlotsOfABucketAreInTokenOrder) {
  RawIndex index = RawIndex::read(dir_.file("buckets.sqz"));
  size_t slot = 0;  // the first of a bucket with two
  for (size_t c = 0; slot == 0; ++c) {
    const auto first = index.get<uint32_t>("layers.1.buckets.offsets", c);
    if (index.get<uint32_t>("layers.1.buckets.offsets", c + 1) > first + 1) slot = first + 1;
  }
  std::string& positions = index.at("layers.1.positions").data;
  std::swap_ranges(positions.begin() + 4 * static_cast<std::ptrdiff_t>(slot - 1),
                   positions.begin() + 4 * static_cast<std::ptrdiff_t>(slot),
                   positions.begin() + 4 * static_cast<std::ptrdiff_t>(slot));
  index.fix_checksums();
  testing::write_file(dir_.file("x"), index.bytes());
  EXPECT_THAT(problem_of("x"), HasSubstr("layers.1.positions: head 0"));
}

TEST_F(SqzVerify, ChecksumsAreThoseOfTheTensors) {
  const RawIndex whole = RawIndex::read(dir_.file("tree.sqz"));
  const std::pair<std::string, const char*> wrong[] = {
      {"no JSON", "checksums"},
      {"[]", "checksums"},
      {R"({"layers.0.keys": 3})", "layers.0.keys"},
      {R"({"layers.9.keys": "0"})", "layers.9.keys"},
      {R"({"layers.0.level.1.centroids": "0123456789abcdef"})", "centroids\": XXH3-64"},
      {"{}", "centroids\": XXH3-64"}};
  for (const auto& [checksums, field] : wrong) {
    RawIndex index = whole;
    index.metadata["checksums"] = checksums;
    testing::write_file(dir_.file("x"), index.bytes());
    EXPECT_THAT(problem_of("x"), HasSubstr(field)) << checksums;
  }
}

// scripts/check_index.py must like what we like, and see what we see and more.
TEST_F(SqzVerify, TheIndependentCheckerAgrees) {
  TinyIndexOptions other;
  other.layers = 3;
  other.dtype = DType::kF16;
  other.dense_layers = {0};
  other.windows = {{1, 10}};
  ASSERT_TRUE(testing::write_tiny_index(dir_.file("other.sqz"), other).ok());
  std::string whole, damaged;
  for (const char* name : {"tree.sqz ", "other.sqz ", "pages.sqz ", "buckets.sqz "}) {
    whole += dir_.file(name);
  }
  const auto [good, said] = testing::check_index(whole);
  if (good < 0) GTEST_SKIP() << "no numpy";
  EXPECT_EQ(good, 0) << said;

  std::vector<Wrong> all(std::begin(kWrong), std::end(kWrong));
  all.insert(all.end(), std::begin(kWrongMeans), std::end(kWrongMeans));
  for (size_t i = 0; i < all.size(); ++i) damaged += dir_.file(write_wrong(dir_, all[i], i)) + " ";
  const auto [bad, found] = testing::check_index(damaged);
  EXPECT_EQ(bad, 1) << found;
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string name = concat("wrong", i, ": ");
    EXPECT_THAT(found, HasSubstr(name)) << all[i].field;
    EXPECT_THAT(found, ::testing::Not(::testing::ContainsRegex(name + ".*no problem found")))
        << all[i].field;
  }
}

// Large enough to be worth several threads, and to be hashed in several parts; of two damages the
// first one is found.
TEST(SqzVerifyThreads, SameResultForAnyNumberOfThreads) {
  TemporaryDirectory dir;
  const std::string path = dir.file("x.sqz");
  const TinyIndexOptions options = {.head_dim = 64, .tokens = 20000, .clusters = {3, 60}};
  must(testing::write_tiny_index(path, options));
  RawIndex raw = RawIndex::read(path);
  ASSERT_GT(raw.at("layers.0.values").data.size(), kChecksumChunk);
  ASSERT_TRUE(SqzFile::open(path, OpenMode::kVerify).ok());
  for (const char* name : {"layers.0.values", "layers.1.keys"}) raw.at(name).data.back() ^= 1;
  testing::write_file(path, raw.bytes());
  const auto file = must(SqzFile::open(path));
  for (const int threads : {1, 2, 5}) {
    EXPECT_THAT(file->verify({}, threads).message(), HasSubstr("\"layers.0.values\": XXH3-64"));
  }
}

}  // namespace
}  // namespace sqz
