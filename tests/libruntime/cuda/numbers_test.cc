// Numbers on the GPU at the end of float32 and beyond it.
#include <gmock/gmock.h>

#include "libruntime/cuda/device_index.h"
#include "tests/libruntime/cuda/blocks.h"

namespace sqz::cuda {
namespace {

constexpr int64_t kHeads = 3, kGroup = 4, kDim = 64;

class Numbers : public test::OnGpu {
 protected:
  // A layer whose keys and centroids consist of `key`, its values of `value`; and a session.
  struct Filled {
    testing::Served served;
    std::unique_ptr<ServingSession> session;
    std::vector<std::byte> keys, values;

    Filled(float key, float value, bool dense, bool sm80, double scale = 0.125)
        : served(testing::serve(test::shape(kDim, kGroup, {40}))) {
      const auto all = [&](float x) {
        return testing::stored(served.index->metadata().dtype,
                               std::vector<float>(kHeads * 4321 * kDim, x));
      };
      keys = all(key);
      values = all(value);
      ServedIndex index = *served.index;
      index.of_range = index.metadata();
      index.of_range->model.attention_scale = scale;
      for (LayerView& view : index.layers) {
        view.keys = view.exact_keys = view.level[0].centroids = keys.data();
        view.values = view.exact_values = values.data();
      }
      served.index = std::make_shared<const ServedIndex>(index);
      SelectionRequest selection = test::with_thresholds({1e-9});
      if (dense) selection = {.selector = SelectorKind::kDense};
      session = test::gpu_session(served, selection, {.sm80_kernels = sm80});
    }
    // Queries whose tokens consist of these numbers.
    testing::Output attend(const std::vector<float>& tokens, const test::Lengths& lengths,
                           DType dtype = DType::kBF16) const {
      std::vector<float> queries;
      for (const float x : tokens) queries.insert(queries.end(), kHeads * kGroup * kDim, x);
      test::DeviceCall call(served, 0, lengths, dtype);
      call.set_queries(queries);
      EXPECT_TRUE(session->attend(call.call).ok());
      return call.output();
    }
    testing::Output attend(float query, const test::Lengths& lengths,
                           DType dtype = DType::kBF16) const {
      const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
      return attend(std::vector<float>(static_cast<size_t>(tokens), query), lengths, dtype);
    }
  };
};

// As on the CPU, whose errors are NaN here.
void expect_nan(const testing::Output& found) {
  for (const float x : found.lse) ASSERT_TRUE(std::isnan(x));
  for (const float x : found.out) ASSERT_TRUE(std::isnan(x));
}

void expect_near(const testing::Output& found, double lse, double out) {
  for (const float x : found.lse) ASSERT_NEAR(x / lse, 1, 1e-2);
  for (const float x : found.out) ASSERT_NEAR(x / out, 1, 4e-3);
}

// Kernels may give up where a step of float32 is larger than what they subtract.
void expect_near_or_nan(testing::Output found, double lse, double out) {
  for (float& x : found.lse) x = std::isnan(x) ? static_cast<float>(lse) : x;
  for (float& x : found.out) x = std::isnan(x) ? static_cast<float>(out) : x;
  expect_near(found, lse, out);
}

// The calls that different kernels serve.
const test::Lengths kToken = {1}, kPrompt = {40}, kBatch = test::single_tokens(8);

TEST_F(Numbers, BeyondFloat32) {
  for (const bool sm80 : {false, true}) {
    for (const bool dense : {true, false}) {
      SCOPED_TRACE(concat("sm80 ", sm80, ", dense ", dense));
      const Filled large(1, 1e5f, dense, sm80), huge(1, 3e38f, dense, sm80);
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const test::Lengths& lengths : {kToken, kPrompt, kBatch}) {
          SCOPED_TRACE(concat(lengths.size(), " requests of ", lengths[0], ", ",
                              dtype == DType::kF32 ? "f32" : "bf16"));
          for (const float query : {-3e38f, 3e38f}) expect_nan(large.attend(query, lengths, dtype));
          expect_near(large.attend(-1e5f, lengths, dtype), -8e5, 1e5);
          for (const float query : {-1e16f, -3e16f}) {
            expect_near_or_nan(large.attend(query, lengths, dtype), 8 * query, 1e5);
          }
          expect_nan(huge.attend(0, lengths, dtype));
        }
      }
      // A token that selects goes to the kernels of prompts, unless the GPU is a Hopper.
      const testing::Output token = large.attend(-2e36f, kToken, DType::kF32);
      if (large.session->route() == std::string_view("decode")) {
        expect_near(token, -1.6e37, 1e5);
      } else {
        EXPECT_FALSE(dense) << large.session->route();
        expect_near_or_nan(token, -1.6e37, 1e5);
      }
      for (const float x : large.attend(0, kToken, DType::kF16).out) ASSERT_EQ(x, 65504);
      // Products that overflow only when they are scaled.
      const Filled scaled(1, 1, dense, sm80, 8);
      for (const test::Lengths& lengths : {kToken, kPrompt, kBatch}) {
        expect_nan(scaled.attend(-3e36f, lengths));
      }
    }
  }
}

// The kernels of Hopper do not look for overflow: they are not given such keys.
TEST_F(Numbers, OfKeysBeyondFloat32) {
  for (const bool dense : {true, false}) {
    const Filled large(3e38f, 1, dense, false);
    for (const test::Lengths& lengths : {kToken, kPrompt, kBatch}) {
      SCOPED_TRACE(concat("dense ", dense, ", ", lengths.size(), " requests of ", lengths[0]));
      expect_nan(large.attend(-1, lengths));
      expect_near(large.attend(-1e-35f, lengths), -2.4e4, 1);
      EXPECT_THAT(large.session->route(),
                  ::testing::AnyOf(::testing::StrEq("decode"), ::testing::StrEq("prefill-sm80")));
    }
  }
}

// A request with such a query leaves the others alone.
TEST_F(Numbers, OfOneRequest) {
  for (const bool dense : {true, false}) {
    SCOPED_TRACE(concat("dense ", dense));
    const Filled filled(1, 1, dense, false);
    const testing::Output found = filled.attend({1, 1, 1, -3e38f, 1, 1, 1, 1}, kBatch);
    for (size_t row = 0; row < found.lse.size(); ++row) {
      const bool overflows = row / (kHeads * kGroup) == 3;
      ASSERT_EQ(std::isnan(found.lse[row]), overflows) << row;
      for (int64_t i = 0; i < kDim; ++i) {
        ASSERT_EQ(std::isnan(found.out[row * kDim + static_cast<size_t>(i)]), overflows) << row;
      }
    }
  }
}

}  // namespace
}  // namespace sqz::cuda
