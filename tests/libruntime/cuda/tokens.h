// Calls of the C ABI on a GPU or on the CPU: an index, options, and tensors of one call.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "sqz/sqz.hpp"
#include "tests/common/tiny_index.h"
#include "tests/libindex/cuda/device.h"
#include "tests/libruntime/random_data.h"

namespace sqz::cuda::test {

inline constexpr int64_t kDim = 64, kGroup = 2, kHeads = 4;  // KV heads

inline testing::TinyIndexOptions shape() {
  testing::TinyIndexOptions o;
  o.layers = 2;
  o.kv_heads = kHeads;
  o.query_heads = kHeads * kGroup;
  o.head_dim = kDim;
  o.tokens = 6000;
  o.sink = 16;
  o.tail = 100;
  o.clusters = {50, 300};
  o.heavy_hitters = true;
  return o;
}

inline sqz_session_options held_budget(double budget, bool on_gpu) {
  auto options = runtime::options_for_budget(budget);
  options.rule = SQZ_RULE_BUDGET;
  options.device_type = on_gpu ? 2 : 1;
  return options;
}

// Tokens in memory of the CPU or the GPU, lse as [heads, tokens]: a call and what it returns.
class Tokens {
 public:
  Tokens(const std::vector<float>& q, int64_t query_heads, bool on_gpu)
      : tokens_(std::ssize(q) / query_heads / kDim),
        shape_{tokens_, query_heads, kDim},
        strides_{1, tokens_},
        q_(q),
        out_(q.size()),
        lse_(q.size() / kDim),
        device_q_(q),
        device_out_(q.size()),
        device_lse_(q.size() / kDim) {
    q_tensor_ = tensor(on_gpu ? device_q_.get() : q_.data(), 3, on_gpu);
    out_tensor_ = tensor(on_gpu ? device_out_.get() : out_.data(), 3, on_gpu);
    lse_tensor_ = tensor(on_gpu ? device_lse_.get() : lse_.data(), 2, on_gpu);
    lse_tensor_.strides = strides_;
    args = runtime::make<sqz_attend_args>();
    args.q = &q_tensor_;
    args.out = &out_tensor_;
    args.lse = &lse_tensor_;
  }
  Tokens(const Tokens&) = delete;

  void expect_like(const Tokens& cpu) const {
    const std::vector<float> out = device_out_.host(), lse = device_lse_.host();
    for (size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(cpu.lse_[i])) {
        ASSERT_EQ(lse[i], cpu.lse_[i]) << i;
      } else {
        ASSERT_NEAR(lse[i], cpu.lse_[i], 1e-3) << i;
      }
    }
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], cpu.out_[i], 6e-3) << i;
  }
  // A call on the GPU would have written something that is not there.
  void clear() {
    EXPECT_EQ(cudaMemset(device_out_.get(), 0xFF, out_.size() * sizeof(float)), cudaSuccess);
  }
  std::vector<float> gpu_out() const { return device_out_.host(); }
  std::vector<float> gpu_lse() const { return device_lse_.host(); }

  sqz_attend_args args;

 private:
  sqz_tensor tensor(float* data, int32_t dims, bool on_gpu) {
    sqz_tensor tensor = runtime::f32_tensor(data, shape_, dims);
    tensor.device_type = on_gpu ? 2 : 1;
    return tensor;
  }

  int64_t tokens_, shape_[3], strides_[2];
  std::vector<float> q_, out_, lse_;
  DeviceArray<float> device_q_, device_out_, device_lse_;
  sqz_tensor q_tensor_, out_tensor_, lse_tensor_;
};

inline std::vector<float> queries(int64_t tokens, int64_t query_heads, uint64_t seed = 3) {
  return testing::Random(seed).normals(tokens * query_heads * kDim);
}

}  // namespace sqz::cuda::test
