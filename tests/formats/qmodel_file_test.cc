// Query classifiers: what is written comes back, and nothing else is taken for one.
#include "formats/qmodel_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>

#include "tests/common/must.h"
#include "tests/common/same_qmodel.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/common/tiny_qmodel.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::RawIndex;
using testing::TemporaryDirectory;
using testing::tiny_qmodel;

std::string write(const std::string& path, const QmodelFile& f = tiny_qmodel()) {
  must(write_qmodel_file(Env::posix(), path, true, f));
  return path;
}

TEST(QmodelFile, ComesBackAsItWasWritten) {
  TemporaryDirectory dir;
  const std::string path = dir.file("q.sqz");
  const QmodelFile f = tiny_qmodel();
  const auto bytes = must(write_qmodel_file(Env::posix(), path, false, f));
  EXPECT_EQ(bytes, testing::read_file(path).size());
  const auto back = must(read_qmodel_file(path));
  EXPECT_EQ(back.model, f.model);
  EXPECT_EQ(back.tokenizer_hash, f.tokenizer_hash);
  EXPECT_EQ(back.training, f.training);
  testing::expect_same_layers(back, f);
  EXPECT_EQ(write_qmodel_file(Env::posix(), path, false, f).status().code(), Code::kExists);
  const std::string first = testing::read_file(path);
  write(path);
  EXPECT_EQ(testing::read_file(path), first) << "the same contents, the same bytes";
}

TEST(QmodelFile, Bf16RoundsTheWeightsAlone) {
  TemporaryDirectory dir;
  QmodelFile f = tiny_qmodel();
  f.dtype = DType::kBF16;
  const auto back = must(read_qmodel_file(write(dir.file("q.sqz"), f)));
  for (auto* values : {&f.layers[1].hidden_weight, &f.layers[1].output_weight}) {
    for (float& x : *values) x = to_float(to_bfloat16(x));
  }
  testing::expect_same_layers(back, f);
}

// docs/format.md, taken at its word.
TEST(QmodelFile, IsLaidOutAsTheFormatPageSays) {
  TemporaryDirectory dir;
  QmodelFile f = tiny_qmodel();
  f.dtype = DType::kBF16;
  const RawIndex raw = RawIndex::read(write(dir.file("q.sqz"), f));
  const std::string bytes = testing::read_file(dir.file("q.sqz"));
  std::vector<std::string> names;
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  size_t at = 8 + length;
  for (const auto& tensor : raw.tensors) {
    if (tensor.name.starts_with("padding.")) {
      EXPECT_EQ(tensor.data.find_first_not_of('\0'), std::string::npos);
    } else {
      EXPECT_EQ(at % (tensor.name.ends_with("centroids") ? 4096 : 64), 0u) << tensor.name;
      names.push_back(concat(tensor.name, " ", tensor.dtype, " ", shape_text(tensor.shape)));
    }
    at += tensor.data.size();
  }
  EXPECT_EQ(at, bytes.size());
  EXPECT_THAT(names,
              ::testing::ElementsAre(
                  "layers.1.centroids F32 [2, 3, 4]", "layers.1.hidden.weight BF16 [2, 5, 4]",
                  "layers.1.hidden.bias F32 [2, 5]", "layers.1.output.weight BF16 [2, 3, 5]",
                  "layers.1.output.bias F32 [2, 3]", "header.xxh3_128 U8 [16]"));
  EXPECT_EQ(raw.metadata.at("kind"), "qmodel");
  EXPECT_EQ(raw.metadata.at("dense"), "[0]");
  EXPECT_EQ(raw.metadata.at("recall"),
            R"([{"recall":0.25,"selectivity":0.05},{"recall":0.5,"selectivity":0.2}])");
}

TEST(QmodelFile, IsToldFromAnIndex) {
  TemporaryDirectory dir;
  write(dir.file("q.sqz"));
  ASSERT_TRUE(testing::write_tiny_index(dir.file("x.sqz")).ok());
  testing::write_file(dir.file("x.txt"), "some text");
  EXPECT_TRUE(has_kind(dir.file("q.sqz"), FileKind::kQmodel));
  EXPECT_FALSE(has_kind(dir.file("x.sqz"), FileKind::kQmodel));
  EXPECT_FALSE(has_kind(dir.file("none"), FileKind::kQmodel));
  EXPECT_THAT(SqzFile::open(dir.file("q.sqz")).status().message(),
              HasSubstr("kind: found \"qmodel\", expected \"index\""));
  EXPECT_THAT(read_qmodel_file(dir.file("x.sqz")).status().message(),
              HasSubstr("kind: found \"index\", expected \"qmodel\""));
  EXPECT_THAT(read_qmodel_file(dir.file("x.txt")).status().message(),
              HasSubstr("not a query classifier: it begins with \"some text\""));
}

TEST(QmodelFile, ContentsThatAreWrongAreNamed) {
  TemporaryDirectory dir;
  const RawIndex whole = RawIndex::read(write(dir.file("q.sqz")));
  for (const auto& [tensor, value, said] :
       {std::tuple("layers.1.output.bias", std::nanf(""), "\"layers.1.output.bias\": found NaN"),
        {"layers.1.centroids", 9.0f, "layers.1.centroids: KV head 0, bucket 0"}}) {
    RawIndex raw = whole;
    raw.set(tensor, 0, value);
    raw.fix_checksums();
    testing::write_file(dir.file("q.sqz"), raw.bytes());
    EXPECT_THAT(read_qmodel_file(dir.file("q.sqz")).status().message(), HasSubstr(said));
  }
}

TEST(QmodelFile, WhatIsOutOfRangeIsNotWritten) {
  TemporaryDirectory dir;
  const std::pair<const char*, std::function<void(QmodelFile&)>> mistakes[] = {
      {"layers.1.output.bias", [](auto& f) { f.layers[1].output_bias.pop_back(); }},
      {"layers.0.output.bias", [](auto& f) { f.layers[0].output_bias.push_back(1); }},
      {"layers.1.hidden.bias", [](auto& f) { f.layers[1].hidden_bias[0] = NAN; }},
      {"layers.1.centroids", [](auto& f) { f.layers[1].centroids[2] += 1; }},
      {"layers", [](auto& f) { f.layers.pop_back(); }},
      {"dtype", [](auto& f) { f.dtype = DType::kF16; }}};
  for (const auto& [field, change] : mistakes) {
    QmodelFile f = tiny_qmodel();
    change(f);
    const Status status = write_qmodel_file(Env::posix(), dir.file("q.sqz"), false, f).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(concat("q.sqz: ", field, ": ")));
    EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  }
}

}  // namespace
}  // namespace sqz
