// Rows of codes: what a reader decodes is near what was stored, a build and a compressed index are
// the same bytes, and what is malformed is refused by name.
#include "libindex/compress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::RawIndex;
using testing::TinyIndexOptions;

constexpr int64_t kDim = 24;  // 3 and 12 bytes of codes: no multiple of a vector

std::string compressed(const testing::TemporaryDirectory& dir, const CompressOptions& options,
                       TinyIndexOptions tiny = {.head_dim = kDim}) {
  const std::string path = dir.file("whole.sqz"), out = dir.file("codes.sqz");
  EXPECT_TRUE(testing::write_tiny_index(path, tiny).ok());
  const auto index = SqzFile::open(path);
  const auto report = compress_index(Env::posix(), **index, options, out, true, 1);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return out;
}

// Relative to the norm of the residuals, over all rows of one kind.
double error_of(const SqzFile& whole, const SqzFile& file, const CodedRows LayerView::*member,
                const void* LayerView::*exact, const void* LevelView::*mean) {
  const LayerView from = whole.layer(0), view = file.layer(0);
  const int64_t d = view.head_dim;
  const LevelView& level = view.level[1];
  const auto at = [](const void* rows, int64_t i) {
    return double{to_float(static_cast<const BFloat16*>(rows)[i])};
  };
  double off = 0, all = 0;
  std::vector<int8_t> numbers(static_cast<size_t>(d));
  for (int64_t head = 0; head < view.kv_heads; ++head) {
    const CodedRows rows = (view.*member).from_head(head, view.slots, d);
    for (int64_t c = 0; c < level.clusters; ++c) {
      const uint32_t* offsets = level.offsets + head * (level.clusters + 1);
      for (int64_t slot = offsets[c]; slot < offsets[c + 1]; ++slot) {
        decode_row(rows.codes + slot * code_bytes(d, rows.bits), rows.bits, d, numbers.data());
        for (int64_t i = 0; i < d; ++i) {
          double decoded = 0;
          for (int64_t j = 0; j < d; ++j) {
            const double turn = !rows.rotated() ? i == j : double{view.rotation[i * d + j]};
            decoded += at(rows.scales, slot) * numbers[static_cast<size_t>(j)] * turn;
          }
          const double residual = at(from.*exact, (head * view.slots + slot) * d + i) -
                                  at(level.*mean, (head * level.clusters + c) * d + i);
          off += (decoded - residual) * (decoded - residual);
          all += residual * residual;
        }
      }
    }
  }
  return std::sqrt(off / all);
}

TEST(Compress, DecodesToWhatWasStored) {
  testing::TemporaryDirectory dir;
  for (const int bits : {1, 2}) {
    const auto file = SqzFile::open(compressed(dir, {.rows = RowKind::kQ8, .key_codes = bits}));
    const auto whole = SqzFile::open(dir.file("whole.sqz"));
    ASSERT_TRUE(file.ok()) << file.status().message();
    EXPECT_THAT((*file)->verify()->problems, ::testing::IsEmpty());
    const auto error = [&](const CodedRows LayerView::*rows, bool keys) {
      return error_of(**whole, **file, rows, keys ? &LayerView::keys : &LayerView::values,
                      keys ? &LevelView::centroids : &LevelView::value_means);
    };
    EXPECT_LT(error(&LayerView::coded_keys, true), 0.01);
    EXPECT_LT(error(&LayerView::coded_values, false), 0.15);
    // Lloyd-Max levels of a normal are off by .60 and .34; unbiased scales by a little more.
    EXPECT_NEAR(error(&LayerView::key_codes, true), bits == 1 ? 0.74 : 0.36, 0.05);
    const std::vector<float> keys = decoded_keys((*file)->layer(0)),
                             exact = decoded_keys((*whole)->layer(0));
    for (size_t i = 0; i < keys.size(); ++i) EXPECT_NEAR(keys[i], exact[i], 0.02);
  }
}

TEST(Compress, FloatSixteenAndLayersOfSixteenBits) {
  testing::TemporaryDirectory dir;
  const auto file = SqzFile::open(
      compressed(dir, {.rows = RowKind::kQ8, .layers16 = {1}},
                 {.layers = 3, .head_dim = kDim, .dense_layers = {2}, .dtype = DType::kF16}));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_THAT((*file)->verify()->problems, ::testing::IsEmpty());
  EXPECT_EQ((*file)->layer(0).keys, nullptr);
  EXPECT_EQ((*file)->layer(0).coded_values.bits, 8);
  EXPECT_NE((*file)->layer(1).keys, nullptr);
  EXPECT_EQ((*file)->layer(2).exact, 64);
  EXPECT_EQ((*file)->layer(0).rotation, nullptr) << "8 bits are not rotated";
  EXPECT_EQ((*file)->raw_metadata().at("format_version"), "2");
}

TEST(Compress, AnIndexOfSixteenBitsIsWrittenAsEver) {
  testing::TemporaryDirectory dir;
  ASSERT_TRUE(testing::write_tiny_index(dir.file("x.sqz")).ok());
  EXPECT_EQ((*SqzFile::open(dir.file("x.sqz")))->raw_metadata().at("format_version"), "1");
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
  EXPECT_THAT(refused(write({}), {.key_codes = 3}), HasSubstr("key_codes: found 3"));
  EXPECT_THAT(refused(compressed(dir, q8), q8), HasSubstr("rows: found q8, expected 16 bits"));
}

// 0 if scripts/check_index.py, which knows the format page alone, likes the file, 1 if not; -1
// without numpy.
int checked(const std::string& path) {
  const char* named = std::getenv("SQZ_PYTHON");
  const std::string python = named ? named : "python3";
  if (std::system((python + " -c 'import numpy' 2>/dev/null").c_str()) != 0) return -1;
  return WEXITSTATUS(std::system(
      (python + " " SQZ_SOURCE_DIR "/scripts/check_index.py " + path + " >/dev/null").c_str()));
}

TEST(Compress, TheIndependentCheckerAgrees) {
  testing::TemporaryDirectory dir;
  for (const CompressOptions& options : {CompressOptions{.rows = RowKind::kQ8},
                                         {.rows = RowKind::kQ8, .key_codes = 1, .layers16 = {0}},
                                         {.key_codes = 2}}) {
    const int code = checked(compressed(dir, options));
    if (code < 0) GTEST_SKIP() << "no numpy; SQZ_PYTHON names another Python";
    EXPECT_EQ(code, 0);
  }
}

struct Malformed {
  const char* name;
  std::function<void(RawIndex&)> change;
  std::vector<std::string> says;
  bool at_open = true;  // or found by verify
};

void retype(RawIndex& index, const char* tensor, const char* dtype, std::vector<int64_t> shape) {
  index.at(tensor).dtype = dtype;
  index.at(tensor).shape = std::move(shape);
}

std::vector<Malformed> malformed() {
  const auto meta = [](const char* name, const char* key, const char* value,
                       std::vector<std::string> says) {
    return Malformed{name, [=](RawIndex& index) { index.metadata[key] = value; }, std::move(says)};
  };
  const auto number = [](const char* name, const char* tensor, auto value,
                         std::vector<std::string> says) {
    return Malformed{name, [=](RawIndex& index) { index.set(tensor, 3, value); }, std::move(says),
                     false};
  };
  const uint16_t nan = 0x7fc0, infinite = 0x7f80, negative = 0xbf80;
  return {
      meta("UnknownRows", "rows", "q5", {"rows: found \"q5\"", "\"q8\" or \"q4\""}),
      meta("RowsOfOtherBits", "rows", "q8", {"layers.0.values", "U8[2, 56, 12]", "I8[2, 56, 24]"}),
      {"RowsNotSaid", [](RawIndex& index) { index.metadata.erase("rows"); }, {"layers.0.keys"}},
      meta("ThreeBits", "key_codes", "3", {"key_codes: found 3"}),
      meta("OneBit", "key_codes", "1", {"layers.0.key_codes", "U8[2, 56, 6]", "U8[2, 56, 3]"}),
      {"CodesNotSaid", [](RawIndex& index) { index.metadata.erase("key_codes"); }, {"key_codes"}},
      meta("OldVersion", "format_version", "1", {"format_version: found 1", "expected 2"}),
      {"NoSeed", [](RawIndex& index) { index.metadata.erase("rotation_seed"); }, {"rotation_seed"}},
      meta("KvDenied", "kv", "false", {"kv: found false", "rows of q4"}),
      meta("ValueMeansDenied", "value_means", "false", {"value_means: found false"}),
      {"LayerOfUnknownRows",
       [](RawIndex& index) { index.set_json("layers", "/0/rows", "q8"); },
       {"layers", "rows: found \"q8\"", "\"16\""}},
      {"LayerOfSixteenBits",
       [](RawIndex& index) { index.set_json("layers", "/0/rows", "16"); },
       {"layers.0.keys", "I8[2, 56, 24]", "BF16[2, 56, 24]"}},
      {"NoRotation",
       [](RawIndex& index) {
         index.tensors.erase(index.tensors.begin() +
                             static_cast<ptrdiff_t>(index.place("rotation")));
       },
       {"rotation"}},
      {"NoScales",
       [](RawIndex& index) {
         index.tensors.erase(index.tensors.begin() +
                             static_cast<ptrdiff_t>(index.place("layers.0.keys.scales")));
       },
       {"layers.0.keys.scales"}},
      {"ScalesOfOtherType",
       [](RawIndex& index) {
         retype(index, "layers.0.keys.scales", "F16", {2, 56});
       },
       {"layers.0.keys.scales", "F16[2, 56]", "BF16[2, 56]"}},
      {"CodesOfOtherType",
       [](RawIndex& index) {
         retype(index, "layers.0.keys", "U8", {2, 56, 24});
       },
       {"layers.0.keys", "U8[2, 56, 24]", "I8[2, 56, 24]"}},
      {"RotationOfOtherShape",
       [](RawIndex& index) {
         retype(index, "rotation", "F32", {12, 48});
       },
       {"rotation", "F32[12, 48]", "F32[24, 24]"}},
      number("ScaleIsNan", "layers.0.keys.scales", nan, {"layers.0.keys.scales", "slot 3", "nan"}),
      number("ScaleIsInfinite", "layers.1.values.scales", infinite, {"values.scales", "inf"}),
      number("ScaleIsNegative", "layers.0.key_codes.scales", negative,
             {"key_codes.scales", "found -1, expected a number, at least 0"}),
      number("NumberBelowAll", "layers.0.keys", int8_t{-128},
             {"layers.0.keys: head 0, slot 0: found -128, expected -127 to 127"}),
      number("NotOrthogonal", "rotation", 2.0f, {"rotation: product of rows", "orthogonal"}),
      number("RotationIsNan", "rotation", NAN, {"rotation: product of rows", "nan"}),
      {"KeysFarFromTheirMeans",
       [](RawIndex& index) {
         for (size_t i = 0; i < 56; ++i) index.set<uint16_t>("layers.0.keys.scales", i, 0x4000);
       },
       {"layers.0.level.2.centroids", "the mean of its"},
       false},
  };
}

class CompressMalformed : public ::testing::TestWithParam<Malformed> {};

TEST_P(CompressMalformed, IsRefusedByName) {
  testing::TemporaryDirectory dir;
  const std::string path = compressed(dir, {.rows = RowKind::kQ8, .key_codes = 2});
  RawIndex index = RawIndex::read(path);
  GetParam().change(index);
  if (!GetParam().at_open) index.fix_checksums();
  testing::write_file(path, index.bytes());
  const auto file = SqzFile::open(path);
  ASSERT_EQ(file.ok(), !GetParam().at_open) << (file.ok() ? "" : file.status().message());
  std::string message;
  if (file.ok()) {
    const auto report = (*file)->verify();
    for (const std::string& problem : report->problems) message += problem + "; ";
    EXPECT_NE(checked(path), 0);
  } else {
    message = file.status().message();
  }
  for (const std::string& part : GetParam().says) EXPECT_THAT(message, HasSubstr(part));
}

INSTANTIATE_TEST_SUITE_P(All, CompressMalformed, ::testing::ValuesIn(malformed()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace sqz
