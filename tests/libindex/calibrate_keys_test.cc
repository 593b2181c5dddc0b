// The calibration of single keys in indexes of clusters and of pages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "libindex/builder.h"
#include "libindex/calibrate.h"
#include "libindex/calibrate_keys.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_model.h"
#include "tests/libindex/clustered_data.h"
#include "tests/libruntime/reference.h"

namespace sqz {
namespace {

constexpr int64_t kTokens = 500, kDim = 16, kHeads = 2, kQueryHeads = 6, kLayers = 3, kTail = 20;
constexpr int64_t kWindow = 64;  // of layer 1

ModelDescription make_model() {
  ModelDescription model = testing::tiny_model(kLayers, kQueryHeads, kHeads, kDim);
  model.sliding_window[1] = kWindow;
  return model;
}

BuildOptions key_options(Partition partition) {
  BuildOptions options;
  options.sink = 4;
  options.tail = kTail;
  options.threads = 2;
  options.partition = partition;
  options.calibrate_keys = true;
  return options;
}

struct Layer {
  std::vector<float> keys, values, queries;
};

Layer make_layer(int64_t index) {
  const auto seed = static_cast<uint64_t>(index) * 10;
  return {test::clustered_points(kHeads * kTokens, kDim, 30, 0.5f, seed),
          test::clustered_points(kHeads * kTokens, kDim, 30, 0.5f, seed + 1),
          test::clustered_points(kQueryHeads * kTail, kDim, 9, 2.0f, seed + 2)};
}

std::vector<int32_t> make_tokens() {
  return std::vector<int32_t>(kTokens, 7);
}

Result<BuildReport> build(const std::string& path, const BuildOptions& options) {
  const std::vector<int32_t> tokens = make_tokens();
  SQZ_ASSIGN_OR_RETURN(auto builder, IndexBuilder::create(Env::posix(), path, false, make_model(),
                                                          tokens, "", options));
  for (int64_t l = 0; l < kLayers; ++l) {
    const Layer layer = make_layer(l);
    SQZ_RETURN_IF_ERROR(builder->add_layer(l, {layer.keys, layer.values, layer.queries}));
  }
  return builder->finish();
}

// log of each key's attention weight: mean over the heads of the group and `count` queries.
std::vector<double> log_weights(const LayerView& view, const Layer& layer, int64_t head,
                                int64_t first, int64_t count) {
  const std::vector<uint32_t> ones(static_cast<size_t>(view.slots), 1);
  const auto queries = group_queries(layer.queries.data(), kHeads, 3, kTail, kDim);
  return reference::scores(
      {.dtype = view.dtype,
       .dim = kDim,
       .clusters = view.slots,
       .centroids = static_cast<const std::byte*>(view.keys) + head * view.slots * kDim * 2,
       .sizes = ones.data(),
       .queries = queries.data() + (head * kTail + first) * 3 * kDim,
       .tokens = count,
       .group = 3,
       .scale = 0.25},
      std::vector<uint8_t>(ones.size(), 1));
}

class KeyCalibration : public ::testing::TestWithParam<Partition> {};

TEST_P(KeyCalibration, ThresholdsKeepTheirFractionOfAllKeys) {
  const testing::TemporaryDirectory dir;
  ASSERT_TRUE(build(dir.file("x"), key_options(GetParam())).ok());
  const auto file = SqzFile::open(dir.file("x"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ((*file)->verify().message(), "");
  const auto calibration = (*file)->calibration();
  ASSERT_TRUE(calibration.ok()) << calibration.status().message();
  EXPECT_EQ(calibration->queries, kTail);
  EXPECT_EQ(calibration->source, "tail");
  for (int64_t scope = 0; scope < 2; ++scope) {
    const float* curve = calibration->key_thresholds.data() + scope * Calibration::kGrid;
    EXPECT_EQ(curve[0], 1.0f);
    EXPECT_LT(curve[Calibration::kGrid - 1], -1e30f);
    for (const int64_t i : {16, 128, 512, 900}) {
      double kept = 0, all = 0;
      for (const int64_t l : {0, 2}) {
        const LayerView view = (*file)->layer(l);
        const Layer layer = make_layer(l);
        for (int64_t h = 0; h < kHeads; ++h) {
          double head_kept = 0, head_all = 0;
          const int64_t step = scope == 0 ? 1 : kTail;
          for (int64_t t = 0; t < kTail; t += step) {
            for (const double weight : log_weights(view, layer, h, t, step)) {
              head_kept += weight >= curve[i] ? 1 : 0;
              ++head_all;
            }
          }
          const float share =
              calibration
                  ->key_shares[((scope * kLayers + l) * kHeads + h) * Calibration::kGrid + i];
          EXPECT_NEAR(share, head_kept / head_all, 0.005) << "layer " << l << " head " << h;
          kept += head_kept;
          all += head_all;
        }
      }
      EXPECT_NEAR(kept / all, static_cast<double>(i) / 1024, 0.003) << "scope " << scope;
    }
    // The dense layer holds 1.
    EXPECT_EQ(calibration->key_shares[(scope * kLayers + 1) * kHeads * Calibration::kGrid + 9], 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Partitions, KeyCalibration,
                         ::testing::Values(Partition::kKmeans, Partition::kPages));

// Recorded calls: those with one query make scope 0, the others, each as a block, scope 1; a scope
// without any takes what there is.
TEST(KeyCalibrator, KeysAreCalibratedCallByCall) {
  const Layer layer = make_layer(0);
  std::vector<std::byte> keys;
  for (const float x : layer.keys) {
    const uint16_t bits = to_bfloat16(x).bits;
    keys.push_back(static_cast<std::byte>(bits & 0xff));
    keys.push_back(static_cast<std::byte>(bits >> 8));
  }
  const auto thresholds = [&](const std::vector<int64_t>& calls) {
    IndexMetadata metadata;
    metadata.model = make_model();
    metadata.dtype = DType::kBF16;
    KeyCalibrator calibrator(metadata, "test");
    EXPECT_TRUE(calibrator.add_layer(0, keys, layer.queries, calls, 2).ok());
    Calibration out;
    calibrator.finish(out);
    EXPECT_EQ(out.source, "test");
    return std::pair(
        std::vector(out.key_thresholds.begin(), out.key_thresholds.begin() + Calibration::kGrid),
        std::vector(out.key_thresholds.begin() + Calibration::kGrid, out.key_thresholds.end()));
  };
  const auto [singles, block] = thresholds({});
  EXPECT_NE(singles, block);
  EXPECT_EQ(thresholds({kTail}), std::pair(singles, block));
  EXPECT_EQ(thresholds(std::vector<int64_t>(kTail, 1)), std::pair(singles, singles));
  const auto [some, halves] = thresholds({kTail / 2, kTail / 2 - 1, 1});
  EXPECT_NE(some, singles);
  EXPECT_NE(halves, block);
}

TEST(KeyCalibrator, CalibratingKeysNeedsQueries) {
  const testing::TemporaryDirectory dir;
  auto builder = IndexBuilder::create(Env::posix(), dir.file("x"), false, make_model(),
                                      make_tokens(), "", key_options(Partition::kPages));
  ASSERT_TRUE(builder.ok());
  const Layer layer = make_layer(0);
  const Status status = (*builder)->add_layer(0, {layer.keys, layer.values, {}});
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("elements of queries: found 0"), std::string::npos);
}

}  // namespace
}  // namespace sqz
