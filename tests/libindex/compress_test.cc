// Rows of codes: what a reader decodes is near what was stored, a build and a compressed index are
// the same bytes, and what is malformed is refused by name.
#include "libindex/compress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/common/check_index.h"
#include "tests/common/temporary_directory.h"
#include "tests/libruntime/coded_rows.h"

namespace sqz::compress_test {

using ::testing::HasSubstr;
using testing::TinyIndexOptions;

constexpr int64_t kDim = 24;  // no multiple of a vector

std::string compressed(const testing::TemporaryDirectory& dir, const CompressOptions& options,
                       TinyIndexOptions tiny = {.head_dim = kDim}) {
  const std::string path = dir.file("whole.sqz"), out = dir.file("codes.sqz");
  EXPECT_TRUE(testing::write_tiny_index(path, tiny).ok());
  const auto index = SqzFile::open(path);
  const auto report = compress_index(Env::posix(), **index, options, out, true, 1);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return out;
}

// Relative to the norm of the residuals to the means of the finest level, [Hkv, M, d] each.
double error_of(const LayerView& view, const std::vector<float>& decoded,
                const std::vector<float>& exact, const void* means) {
  const LevelView& level = view.level[1];
  double off = 0, all = 0;
  for (int64_t head = 0; head < view.kv_heads; ++head) {
    const uint32_t* offsets = level.offsets + head * (level.clusters + 1);
    for (int64_t c = 0; c < level.clusters; ++c) {
      for (int64_t slot = offsets[c]; slot < offsets[c + 1]; ++slot) {
        for (int64_t i = 0; i < kDim; ++i) {
          const float x = exact[(head * view.slots + slot) * kDim + i];
          off += std::pow(decoded[(head * view.slots + slot) * kDim + i] - x, 2);
          all += std::pow(
              x - reference::element(view.dtype, means, (head * level.clusters + c) * kDim + i), 2);
        }
      }
    }
  }
  return std::sqrt(off / all);
}

TEST(Compress, DecodesToWhatWasStored) {
  testing::TemporaryDirectory dir;
  const auto file = SqzFile::open(compressed(dir, {.rows = RowKind::kQ8}));
  const auto whole = SqzFile::open(dir.file("whole.sqz"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ((*file)->verify().message(), "");
  const LayerView view = (*file)->layer(0);
  const testing::Decoded codes = testing::decode(view), rows = testing::decode((*whole)->layer(0));
  const LevelView& finest = view.level[1];
  EXPECT_LT(error_of(view, codes.keys, rows.keys, finest.centroids), 0.01);
  EXPECT_LT(error_of(view, codes.values, rows.values, finest.value_means), 0.01);
}

TEST(Compress, RefusesWhatItCannotCompress) {
  testing::TemporaryDirectory dir;
  const auto refused = [&](const std::string& path, const CompressOptions& options) {
    const auto index = SqzFile::open(path);
    const auto report =
        compress_index(Env::posix(), **index, options, dir.file("out.sqz"), true, 1);
    return report.ok() ? std::string() : report.status().message();
  };
  const auto write = [&](const TinyIndexOptions& options) {
    EXPECT_TRUE(testing::write_tiny_index(dir.file("x.sqz"), options).ok());
    return dir.file("x.sqz");
  };
  const CompressOptions q8 = {.rows = RowKind::kQ8};
  EXPECT_THAT(refused(write({.page_size = 8}), q8), HasSubstr("partition: found pages"));
  EXPECT_THAT(refused(write({.has_value_means = false}), q8), HasSubstr("value means"));
  EXPECT_THAT(refused(write({.dense_layers = {0, 1}}), q8), HasSubstr("with clusters"));
  EXPECT_THAT(refused(write({}), {.rows = RowKind::kQ8, .layers16 = {2}}),
              HasSubstr("found 2, expected 0 to 1"));
  EXPECT_THAT(refused(compressed(dir, q8), q8), HasSubstr("rows: found q8, expected 16 bits"));
}

TEST(Compress, TheIndependentCheckerAgrees) {
  testing::TemporaryDirectory dir;
  for (const CompressOptions& options :
       {CompressOptions{.rows = RowKind::kQ8}, {.rows = RowKind::kQ8, .layers16 = {0}}}) {
    const auto [code, said] = testing::check_index(compressed(dir, options));
    if (code < 0) GTEST_SKIP() << "no numpy";
    EXPECT_EQ(code, 0) << said;
  }
}

}  // namespace sqz::compress_test
