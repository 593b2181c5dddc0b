// Query classifiers: what is written comes back, and nothing else is taken for one.
#include "formats/qmodel_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/common/same_qmodel.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/common/tiny_qmodel.h"
#include "tests/formats/malformed_file.h"

namespace sqz {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::meta;
using testing::RawIndex;
using testing::TemporaryDirectory;
using testing::tiny_qmodel;
using testing::value;
using testing::without;
using testing::Wrong;

std::string write(const std::string& path, const QmodelFile& f = tiny_qmodel()) {
  const auto bytes = write_qmodel_file(Env::posix(), path, true, f);
  EXPECT_TRUE(bytes.ok()) << bytes.status().message();
  return path;
}

TEST(QmodelFile, ComesBackAsItWasWritten) {
  TemporaryDirectory dir;
  const std::string path = dir.file("q.sqz");
  const QmodelFile f = tiny_qmodel();
  const auto bytes = write_qmodel_file(Env::posix(), path, false, f);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  EXPECT_EQ(*bytes, testing::read_file(path).size());
  const auto back = read_qmodel_file(path);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_THAT(back->producer, ::testing::StartsWith("sqz "));
  EXPECT_EQ(back->model, f.model);
  EXPECT_EQ(back->tokenizer_hash, f.tokenizer_hash);
  EXPECT_EQ(back->buckets, 3);
  EXPECT_EQ(back->hidden, 5);
  EXPECT_EQ(back->recent, 16);
  EXPECT_EQ(back->dtype, DType::kF32);
  EXPECT_EQ(back->dense, std::vector<int64_t>{0});
  EXPECT_EQ(back->training, f.training);
  ASSERT_EQ(back->recall.size(), 2u);
  EXPECT_EQ(back->recall[1].selectivity, 0.2);
  EXPECT_EQ(back->recall[1].recall, 0.5);
  testing::expect_same_layers(*back, f);
  const auto report = verify_qmodel_file(path);
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->problems, IsEmpty());

  EXPECT_EQ(write_qmodel_file(Env::posix(), path, false, f).status().code(), Code::kExists);
  const std::string first = testing::read_file(path);
  write(path);
  EXPECT_EQ(testing::read_file(path), first) << "the same contents, the same bytes";
}

TEST(QmodelFile, CentroidsAfterRopeMayBeThere) {
  TemporaryDirectory dir;
  QmodelFile f = tiny_qmodel({.roped_centroids = true});
  const auto back = read_qmodel_file(write(dir.file("q.sqz"), f));
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_TRUE(back->has_roped_centroids);
  EXPECT_EQ(back->layers[1].roped_centroids.size(), 24u);
  testing::expect_same_layers(*back, f);

  const auto refused = [&](const QmodelFile& wrong) {
    return write_qmodel_file(Env::posix(), dir.file("w.sqz"), true, wrong).status().message();
  };
  QmodelFile longer = f;
  longer.layers[1].roped_centroids[2] += 1;
  EXPECT_THAT(refused(longer), HasSubstr("layers.1.roped_centroids: KV head 0, bucket 0: length"));
  f.has_roped_centroids = false;
  EXPECT_THAT(refused(f), HasSubstr("layers.1.roped_centroids: found 24 values, expected 0"));
  f.has_roped_centroids = true;
  f.layers[1].roped_centroids.clear();
  EXPECT_THAT(refused(f), HasSubstr("layers.1.roped_centroids: found 0 values, expected 24"));
}

TEST(QmodelFile, Bf16RoundsTheWeightsAlone) {
  TemporaryDirectory dir;
  QmodelFile f = tiny_qmodel();
  f.dtype = DType::kBF16;
  const auto back = read_qmodel_file(write(dir.file("q.sqz"), f));
  ASSERT_TRUE(back.ok()) << back.status().message();
  for (auto* values : {&f.layers[1].hidden_weight, &f.layers[1].output_weight}) {
    for (float& x : *values) x = to_float(to_bfloat16(x));
  }
  testing::expect_same_layers(*back, f);
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

TEST(QmodelFile, EveryFlippedBitAndEveryTruncationIsRefused) {
  TemporaryDirectory dir;
  testing::expect_every_damage_refused(testing::read_file(write(dir.file("q.sqz"))), [](Env& env) {
    return read_qmodel_file("q.sqz", env).status();
  });
}

TEST(QmodelFile, AFailureAtAnyCallLeavesNothing) {
  testing::expect_failures_leave_nothing(10, [](Env& env, const std::string& path) {
    return write_qmodel_file(env, path, false, tiny_qmodel()).status();
  });
}

std::vector<Wrong> wrong_headers() {
  return {
      meta("OtherFormat", "format", "pt",
           "not a query classifier: __metadata__: format: found \"pt\""),
      meta("NewerVersion", "format_version", "2", "format_version: found 2", Code::kUnsupported),
      meta("OtherKind", "kind", "layers", "kind: found \"layers\"", Code::kUnsupported),
      without("NoVersion", "format_version"),
      without("NoKind", "kind"),
      without("NoProducer", "producer"),
      without("NoModel", "model"),
      without("NoTokenizerHash", "tokenizer_hash"),
      without("NoBuckets", "buckets"),
      without("NoHidden", "hidden"),
      without("NoRecent", "recent"),
      without("NoDtype", "dtype"),
      {"NoLogits", [](RawIndex& file) { file.metadata.erase("logits"); },
       "logits: found nothing, expected \"key\": train the query classifier again"},
      without("NoDense", "dense"),
      without("NoTraining", "training"),
      without("NoRecall", "recall"),
      without("NoChecksums", "checksums"),
      meta("OneBucket", "buckets", "1", "buckets: found 1"),
      meta("BucketsHuge", "buckets", "9223372036854775807", "buckets: found 9223372036854775807"),
      meta("BucketsQuoted", "buckets", "\"3\"", "buckets: found \"3\""),
      meta("MoreBuckets", "buckets", "4",
           "tensor \"layers.1.centroids\": found F32[2, 3, 4], expected F32[2, 4, 4]"),
      meta("HiddenNone", "hidden", "0", "hidden: found 0"),
      meta("HiddenHuge", "hidden", "1048577", "hidden: found 1048577"),
      meta("MoreHidden", "hidden", "6",
           "tensor \"layers.1.hidden.weight\": found F32[2, 5, 4], expected F32[2, 6, 4]"),
      meta("RecentNegative", "recent", "-1", "recent: found -1"),
      meta("RopedCentroidsUnknown", "roped_centroids", "no", "roped_centroids: found \"no\""),
      meta("RopedCentroidsMissing", "roped_centroids", "stored",
           "tensor \"header.xxh3_128\": found it, expected tensor \"layers.1.roped_centroids\""),
      meta("LogitsOfBuckets", "logits", "bucket", "logits: found \"bucket\", expected \"key\""),
      meta("DtypeUnknown", "dtype", "FP8", "dtype: found \"FP8\""),
      meta("DtypeInteger", "dtype", "I64", "dtype: found I64, expected F32 or BF16"),
      meta("DtypeOther", "dtype", "BF16",
           "tensor \"layers.1.hidden.weight\": found F32[2, 5, 4], expected BF16[2, 5, 4]"),
      meta("DenseNoArray", "dense", "0", "dense: found 0, expected an array"),
      meta("DenseText", "dense", "[\"0\"]", "dense: found \"0\""),
      meta("DenseNegative", "dense", "[-1]", "dense: found -1"),
      meta("DenseBeyond", "dense", "[2]", "dense: found 2 after -1, expected ascending layers"),
      meta("DenseTwice", "dense", "[0,0]", "dense: found 0 after 0"),
      meta("DenseAll", "dense", "[0,1]", "dense: found every layer"),
      meta("DenseNone", "dense", "[]",
           "tensor \"layers.1.centroids\": found it, expected tensor \"layers.0.centroids\""),
      meta("TrainingNoObject", "training", "[]", "training: found an array of 0"),
      meta("RecallNoArray", "recall", "{}", "recall: found an object"),
      meta("RecallNoObject", "recall", "[1]", "recall: found 1, expected an object"),
      meta("RecallWithoutField", "recall", "[{\"recall\":0.1}]", "selectivity: found nothing"),
      meta("RecallAboveOne", "recall", "[{\"recall\":1.5,\"selectivity\":0.1}]",
           "recall: found 1.5"),
      meta("RecallNotAscending", "recall",
           "[{\"recall\":0.5,\"selectivity\":0.1},{\"recall\":0.5,\"selectivity\":0.1}]",
           "recall: selectivity: found 0.1 after 0.1"),
      meta("TokenizerHashBad", "tokenizer_hash", "x", "tokenizer_hash: found \"x\""),
      meta("ModelNotJson", "model", "{", "model: not valid JSON"),
      {"ModelOfThreeLayers",
       [](RawIndex& file) {
         file.set_json("model", "/layers", 3);
         file.set_json("model", "/sliding_window", {0, 0, 0});
       },
       "tensor \"header.xxh3_128\": found it, expected tensor \"layers.2.centroids\" here"},
      {"ShapesHuge",
       [](RawIndex& file) {
         file.metadata["buckets"] = "1048576";
         file.metadata["hidden"] = "1048576";
       },
       "found F32[2, 3, 4], expected F32[2, 1048576, 4]"},
      {"CentroidsOfAnotherType",
       [](RawIndex& file) { file.at("layers.1.centroids").dtype = "I32"; },
       "tensor \"layers.1.centroids\": found I32[2, 3, 4], expected F32[2, 3, 4]"},
      {"TensorRenamed",
       [](RawIndex& file) { file.at("layers.1.output.bias").name = "layers.1.bias"; },
       "tensor \"layers.1.bias\": found it, expected tensor \"layers.1.output.bias\" here"},
      {"TensorMissing",
       [](RawIndex& file) {
         file.tensors.erase(file.tensors.begin() +
                            static_cast<ptrdiff_t>(file.place("layers.1.output.bias")));
       },
       "tensor \"header.xxh3_128\": found it, expected tensor \"layers.1.output.bias\" here"},
      {"TensorTooMany",
       [](RawIndex& file) {
         file.tensors.insert(file.tensors.end() - 1, {"more", "U8", {1}, "x"});
       },
       "tensor \"more\""},
      {"NotOnACacheLine",
       [](RawIndex& file) {
         file.tensors.insert(
             file.tensors.begin() + static_cast<ptrdiff_t>(file.place("layers.1.hidden.bias")),
             {"padding.x", "U8", {8}, std::string(8, '\0')});
       },
       "tensor \"layers.1.hidden.bias\": offset"},
      {"HashMissing", [](RawIndex& file) { file.tensors.pop_back(); }, "last tensor"},
      {"HashOfAnotherHeader",
       [](RawIndex& file) {
         file.keep_hash = true;
         file.metadata["recent"] = "17";
       },
       "hash of the header"},
  };
}

std::vector<Wrong> wrong_contents() {
  return {
      value("CentroidNan", "layers.1.centroids", 5, std::nanf(""), "layers.1.centroids\""),
      value("CentroidLong", "layers.1.centroids", 13, 2.0f,
            "layers.1.centroids: KV head 1, bucket 0: length: found "),
      {"CentroidZero",
       [](RawIndex& file) {
         for (size_t i = 4; i < 8; ++i) file.set("layers.1.centroids", i, 0.0f);
       },
       "layers.1.centroids: KV head 0, bucket 1: length: found 0, expected 1"},
      value("WeightInfinite", "layers.1.hidden.weight", 0, INFINITY, "layers.1.hidden.weight\""),
      value("BiasNan", "layers.1.hidden.bias", 9, std::nanf(""), "layers.1.hidden.bias\""),
      value("OutputNan", "layers.1.output.weight", 3, std::nanf(""), "layers.1.output.weight\""),
      value("OutputBiasInfinite", "layers.1.output.bias", 1, -INFINITY, "layers.1.output.bias\""),
      {"PaddingNotZero", [](RawIndex& file) { file.at("padding.0").data[3] = 'x'; },
       "tensor \"padding.0\": found other bytes"},
  };
}

class QmodelMalformed : public ::testing::TestWithParam<Wrong> {};

TEST_P(QmodelMalformed, IsRefusedByName) {
  TemporaryDirectory dir;
  const std::string path = write(dir.file("q.sqz"));
  testing::expect_refused(GetParam(), path, [](const std::string& changed) {
    return read_qmodel_file(changed).status();
  });
}

INSTANTIATE_TEST_SUITE_P(Headers, QmodelMalformed, ::testing::ValuesIn(wrong_headers()),
                         [](const auto& test) { return test.param.name; });
INSTANTIATE_TEST_SUITE_P(Contents, QmodelMalformed, ::testing::ValuesIn(wrong_contents()),
                         [](const auto& test) { return test.param.name; });

TEST(QmodelFile, VerifyNamesAllThatIsWrong) {
  TemporaryDirectory dir;
  const std::string path = write(dir.file("q.sqz"));
  RawIndex raw = RawIndex::read(path);
  raw.set("layers.1.output.bias", 2, std::nanf(""));
  raw.set("layers.1.centroids", 0, 9.0f);
  testing::write_file(path, raw.bytes());
  const auto report = verify_qmodel_file(path);
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->problems, Contains(HasSubstr("tensor \"layers.1.centroids\": XXH3-64")));
  EXPECT_THAT(report->problems, Contains(HasSubstr("layers.1.centroids: KV head 0, bucket 0")));
  EXPECT_THAT(report->problems, Contains(HasSubstr("layers.1.output.bias: element 2: found nan")));
}

TEST(QmodelFile, WhatIsOutOfRangeIsNotWritten) {
  TemporaryDirectory dir;
  const auto refused = [&](const std::function<void(QmodelFile&)>& change) {
    QmodelFile f = tiny_qmodel();
    change(f);
    const auto written = write_qmodel_file(Env::posix(), dir.file("q.sqz"), false, f);
    EXPECT_EQ(written.status().code(), Code::kInvalidArgument);
    EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
    return written.status().message();
  };
  EXPECT_THAT(refused([](auto& f) { f.layers[1].output_bias.pop_back(); }),
              HasSubstr("q.sqz: layers.1.output.bias: found 5 values, expected 6"));
  EXPECT_THAT(refused([](auto& f) { f.layers[0].output_bias.push_back(1); }),
              HasSubstr("layers.0.output.bias: found 1 values, expected 0"));
  EXPECT_THAT(refused([](auto& f) { f.layers.pop_back(); }), HasSubstr("layers: found 1"));
  EXPECT_THAT(refused([](auto& f) { f.dtype = DType::kF16; }), HasSubstr("dtype: found F16"));
  EXPECT_THAT(refused([](auto& f) { f.layers[1].hidden_bias[0] = NAN; }),
              HasSubstr("layers.1.hidden.bias: element 0"));
}

}  // namespace
}  // namespace sqz
