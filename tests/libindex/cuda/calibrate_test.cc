// Calibration on the GPU beside the CPU's, which calibrate_test.cc compares with float64.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "libindex/cuda/calibration_scorer.h"
#include "tests/libindex/calibration_data.h"
#include "tests/libindex/cuda/device.h"

namespace sqz {
namespace {

using test::make_input;

Result<Calibration> on_gpu(const CalibrationInput& input) {
  cuda::DeviceMemory memory;
  return calibrate(input, *cuda::make_calibration_scorer(input, 0, memory));
}

// Thresholds are log scores: rounding moves some scores to a neighbouring bin of a sketch, 1/128
// wide; where few keys have such scores, the curve is steep and moves further.
void expect_near(const std::vector<float>& found, const std::vector<float>& expected, float limit,
                 const char* what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  size_t off = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] == expected[i]) continue;  // infinite stand-ins among them
    off += std::abs(found[i] - expected[i]) > limit ? 1 : 0;
  }
  EXPECT_LE(off, found.size() / 500) << what;
}

void expect_same_calibration(const CalibrationInput& input) {
  const auto found = on_gpu(input), expected = calibrate(input, 2);
  ASSERT_TRUE(found.ok()) << found.status().message();
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  expect_near(found->thresholds, expected->thresholds, 0.02f, "thresholds");
  expect_near(found->coarse, expected->coarse, 0.02f, "coarse");
  expect_near(found->shares, expected->shares, 2e-3f, "shares");
  EXPECT_EQ(found->coarse_keep, expected->coarse_keep);
  EXPECT_EQ(found->queries, expected->queries);
  EXPECT_EQ(found->source, expected->source);
  const auto again = on_gpu(input);
  EXPECT_EQ(again->thresholds, found->thresholds);
  EXPECT_EQ(again->coarse, found->coarse);
  EXPECT_EQ(again->shares, found->shares);
}

TEST(CudaCalibration, IsTheCpus) {
  SQZ_SKIP_WITHOUT_GPU();
  expect_same_calibration(make_input({67}, 1500));
  expect_same_calibration(make_input({10, 300}, 4000));
  expect_same_calibration(make_input({5, 40, 900}, 20000));
  expect_same_calibration(make_input({1, 1}, 30));
}

TEST(CudaCalibration, CallsOfAnEngine) {
  SQZ_SKIP_WITHOUT_GPU();
  CalibrationInput input = make_input({10, 300}, 4000);
  for (const std::vector<int64_t>& calls :
       {std::vector<int64_t>{7, 1, 1, 1, 12, 1, 1, 1}, {25}, std::vector<int64_t>(25, 1)}) {
    input.calls = calls;
    expect_same_calibration(input);
  }
}

TEST(CudaCalibration, Float16AndOtherDimensions) {
  SQZ_SKIP_WITHOUT_GPU();
  CalibrationInput input = make_input({10, 300}, 4000);
  input.dtype = DType::kF16;
  for (CalibrationLayer& layer : input.sparse) {
    for (CalibrationLayer::Level& level : layer.levels) {
      for (size_t i = 0; i < level.centroids.size(); i += 2) {
        BFloat16 x;
        std::memcpy(&x.bits, &level.centroids[i], 2);
        const uint16_t bits = to_float16(to_float(x)).bits;
        std::memcpy(&level.centroids[i], &bits, 2);
      }
    }
  }
  expect_same_calibration(input);
  input = make_input({10, 300}, 4000);
  input.dim = 8;
  for (CalibrationLayer& layer : input.sparse) {
    for (CalibrationLayer::Level& level : layer.levels) {
      level.centroids.resize(level.centroids.size() / 2);
    }
    layer.queries.resize(layer.queries.size() / 2);
  }
  expect_same_calibration(input);
}

TEST(CudaCalibration, NotFiniteNamesTheHead) {
  SQZ_SKIP_WITHOUT_GPU();
  for (const float bad : {NAN, INFINITY}) {
    CalibrationInput input = make_input({10, 300}, 4000);
    const int64_t head = std::ssize(input.sparse[1].queries) / test::kCalibrationHeads;
    input.sparse[1].queries[static_cast<size_t>(head + 17)] = bad;
    const Status found = on_gpu(input).status(), expected = calibrate(input, 1).status();
    ASSERT_EQ(expected.code(), Code::kNumeric);
    EXPECT_EQ(found.code(), expected.code());
    EXPECT_EQ(found.message(), expected.message());
  }
}

}  // namespace
}  // namespace sqz
