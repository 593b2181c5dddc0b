// An index calibrated anew: what changes in the file, what must not, and what is refused.
#include "libindex/recalibrate.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <limits>

#include "libindex/calibrate.h"
#include "libindex/copy_index.h"
#include "tests/common/must.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"

namespace sqz {
namespace {

using testing::read_file;
using testing::TinyIndexOptions;

const std::vector<int64_t> kCalls = {3, 1, 2, 1, 1};

// Queries [n, Hq, d] of every layer but the dense ones.
RecordedQueries make_queries(const TinyIndexOptions& o, uint64_t seed = 5) {
  RecordedQueries out;
  out.calls = kCalls;
  out.source = "prompts: 2 prompts";
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  for (int64_t l = 0; l < o.layers; ++l) {
    std::vector<float>& layer = out.layers.emplace_back();
    if (o.dense_layers.contains(l)) continue;
    layer.resize(static_cast<size_t>(8 * o.query_heads * o.head_dim));
    for (float& x : layer) x = normal(rng);
  }
  return out;
}

class Recalibrate : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.layers = 3;
    options_.dense_layers = {1};
    must(testing::write_tiny_index(path_, options_));
    // Settings that are not those of every build.
    const auto plain = open(path_);
    IndexMetadata metadata = plain->metadata();
    metadata.chat = {{"user", "Q: "}};
    Calibration calibration = *plain->calibration();
    calibration.coarse_keep = {0.7};
    ASSERT_TRUE(copy_index(Env::posix(), *plain, metadata, calibration, path_, true).ok());
  }

  std::shared_ptr<const SqzFile> open(const std::string& path) const {
    return must(SqzFile::open(path));
  }
  Result<uint64_t> run(const RecordedQueries& queries, const RecalibrateOptions& options,
                       const std::string& output) const {
    return recalibrate(Env::posix(), *open(path_), queries, output, options);
  }
  testing::TemporaryDirectory directory_;
  const std::string path_ = directory_.file("tiny.sqz");
  TinyIndexOptions options_;
};

TEST_F(Recalibrate, OnlyTheCalibrationChanges) {
  const std::string output = directory_.file("out.sqz");
  const auto bytes = must(run(make_queries(options_), {}, output));
  EXPECT_EQ(bytes, std::filesystem::file_size(output));
  const auto before = open(path_), after = open(output);
  EXPECT_EQ(after->verify().message(), "");
  ASSERT_EQ(before->header().tensors.size(), after->header().tensors.size());
  for (const TensorInfo& info : before->header().tensors) {
    const auto was = before->tensor(info.name), is = after->tensor(info.name);
    const bool same = was.size() == is.size() && std::memcmp(was.data(), is.data(), is.size()) == 0;
    const bool changes = info.name.starts_with("calibration.") || info.name.starts_with("header.");
    EXPECT_EQ(same, !changes) << info.name;
  }
  for (const char* key : {"model", "tokens_hash", "tokenizer_hash", "build", "layers", "chat"}) {
    EXPECT_EQ(before->raw_metadata().at(key), after->raw_metadata().at(key));
  }
  const auto calibration = must(after->calibration());
  EXPECT_EQ(calibration.source, "prompts: 2 prompts");
  EXPECT_EQ(calibration.queries, 8);
}

// The file has the calibration that calibrate() finds for the same queries in its own layout.
TEST_F(Recalibrate, TheCalibrationIsOfTheGivenQueries) {
  const RecordedQueries queries = make_queries(options_);
  const std::string output = directory_.file("out.sqz");
  ASSERT_TRUE(run(queries, {}, output).ok());
  const auto file = open(output);
  CalibrationInput input;
  input.layers = options_.layers;
  input.kv_heads = options_.kv_heads;
  input.group = options_.query_heads / options_.kv_heads;
  input.dim = options_.head_dim;
  input.queries = 8;
  input.calls = kCalls;
  input.coarse_keep = 0.7;
  input.scale = static_cast<float>(file->metadata().model.attention_scale);
  for (const int64_t l : {int64_t{0}, int64_t{2}}) {
    CalibrationLayer& layer = input.sparse.emplace_back();
    layer.layer = l;
    for (int k = 1; k <= 2; ++k) {
      const std::string name = concat("layers.", l, ".level.", k, ".");
      const auto centroids = file->tensor(name + "centroids"),
                 offsets = file->tensor(name + "offsets");
      auto& level = layer.levels.emplace_back();
      level.centroids.assign(centroids.begin(), centroids.end());
      level.children.resize(offsets.size() / 4);
      std::memcpy(level.children.data(), offsets.data(), offsets.size());
    }
    const auto& q = queries.layers[static_cast<size_t>(l)];
    for (int64_t kv = 0; kv < input.kv_heads; ++kv) {
      for (int64_t t = 0; t < 8; ++t) {
        for (int64_t head = kv * input.group; head < (kv + 1) * input.group; ++head) {
          for (int64_t c = 0; c < input.dim; ++c) {
            layer.queries.push_back(q[(t * options_.query_heads + head) * input.dim + c]);
          }
        }
      }
    }
  }
  const auto expected = must(calibrate(input, 1));
  const auto found = must(file->calibration());
  EXPECT_EQ(found.thresholds, expected.thresholds);
  EXPECT_EQ(found.coarse, expected.coarse);
  EXPECT_EQ(found.shares, expected.shares);
  EXPECT_EQ(found.coarse_keep, expected.coarse_keep);
}

TEST_F(Recalibrate, InPlaceAndForAnyThreads) {
  const std::string output = directory_.file("out.sqz");
  ASSERT_TRUE(run(make_queries(options_), {.threads = 1}, output).ok());
  ASSERT_TRUE(run(make_queries(options_), {.replace = true, .threads = 3}, path_).ok());
  EXPECT_EQ(read_file(path_), read_file(output));
}

TEST_F(Recalibrate, DamageIsNotGivenNewChecksums) {
  std::string bytes = read_file(path_);
  const auto keys = open(path_)->header().find("layers.2.keys")->offset;
  bytes[keys + 5] = static_cast<char>(bytes[keys + 5] ^ 4);
  testing::write_file(path_, bytes);
  const Status status = run(make_queries(options_), {.replace = true}, path_).status();
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_NE(status.message().find("layers.2.keys"), std::string::npos) << status.message();
  EXPECT_EQ(read_file(path_), bytes);
}

TEST_F(Recalibrate, BadQueriesAreRefused) {
  const std::string output = directory_.file("out.sqz");
  const auto expect = [&](const RecordedQueries& queries, Code code, const std::string& part) {
    const Status status = run(queries, {}, output).status();
    EXPECT_EQ(status.code(), code);
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    EXPECT_FALSE(std::filesystem::exists(output));
  };
  RecordedQueries nan = make_queries(options_);
  nan.layers[2][2 * options_.query_heads * options_.head_dim + options_.head_dim + 1] =
      std::numeric_limits<float>::quiet_NaN();
  expect(nan, Code::kNumeric, "layer 2, query 2, head 1");
  testing::write_file(output, "mine");
  EXPECT_EQ(run(make_queries(options_), {}, output).status().code(), Code::kExists);
}

TEST_F(Recalibrate, NothingToCalibrateWithoutClusters) {
  options_.dense_layers = {0, 1, 2};
  ASSERT_TRUE(testing::write_tiny_index(path_, options_).ok());
  EXPECT_EQ(check_calibratable(*open(path_)).code(), Code::kUnsupported);
  EXPECT_EQ(run(make_queries(options_), {}, directory_.file("out.sqz")).status().code(),
            Code::kUnsupported);
}

}  // namespace
}  // namespace sqz
