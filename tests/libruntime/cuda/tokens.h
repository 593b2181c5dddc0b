// Calls of the C ABI on a GPU or on the CPU: an index, options, and tensors of one call.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "sqz/sqz.hpp"
#include "tests/common/tiny_index.h"
#include "tests/libindex/cuda/device.h"
#include "tests/libruntime/random_data.h"
#include "tests/libruntime/reference.h"

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

// Tokens in memory of the CPU or the GPU, lse as [heads, tokens]: a call and what it returns. On
// the CPU queries are rounded to `dtype`, on the GPU they and outputs are stored so.
class Tokens {
 public:
  Tokens(const std::vector<float>& q, int64_t query_heads, bool on_gpu, DType dtype = DType::kF32)
      : dtype_(dtype),
        tokens_(std::ssize(q) / query_heads / kDim),
        shape_{tokens_, query_heads, kDim},
        strides_{1, tokens_},
        q_(numbers(testing::stored(dtype, q))),
        out_(q.size()),
        lse_(q.size() / kDim),
        device_q_(testing::stored(dtype, q)),
        device_out_(q.size() * static_cast<size_t>(dtype_size(dtype))),
        device_lse_(q.size() / kDim) {
    q_tensor_ = tensor(q_.data(), device_q_.get(), 3, on_gpu);
    out_tensor_ = tensor(out_.data(), device_out_.get(), 3, on_gpu);
    if (on_gpu && dtype == DType::kBF16) {
      for (sqz_tensor* rows : {&q_tensor_, &out_tensor_}) {
        rows->dtype_code = 4;
        rows->dtype_bits = 16;
      }
    }
    lse_tensor_ = tensor(lse_.data(), device_lse_.get(), 2, on_gpu);
    lse_tensor_.strides = strides_;
    args = runtime::make<sqz_attend_args>();
    args.q = &q_tensor_;
    args.out = &out_tensor_;
    args.lse = &lse_tensor_;
  }
  Tokens(const Tokens&) = delete;

  void expect_like(const Tokens& cpu) const {
    const std::vector<float> out = gpu_out(), lse = device_lse_.host();
    const bool rounded = dtype_ != DType::kF32;
    for (size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(cpu.lse_[i])) {
        ASSERT_EQ(lse[i], cpu.lse_[i]) << i;
      } else {
        ASSERT_NEAR(lse[i], cpu.lse_[i], rounded ? 1e-2 : 1e-3) << i;
      }
    }
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], cpu.out_[i], rounded ? 3e-2 : 6e-3) << i;
    }
  }
  // A call on the GPU would have written something that is not there.
  void clear() {
    EXPECT_EQ(
        cudaMemset(device_out_.get(), 0xFF, out_.size() * static_cast<size_t>(dtype_size(dtype_))),
        cudaSuccess);
  }
  std::vector<float> gpu_out() const { return numbers(device_out_.host()); }
  std::vector<float> gpu_lse() const { return device_lse_.host(); }

  sqz_attend_args args;

 private:
  std::vector<float> numbers(const std::vector<std::byte>& bytes) const {
    std::vector<float> out;
    for (int64_t i = 0; i < std::ssize(bytes) / dtype_size(dtype_); ++i) {
      out.push_back(static_cast<float>(reference::element(dtype_, bytes.data(), i)));
    }
    return out;
  }
  sqz_tensor tensor(float* data, void* on_device, int32_t dims, bool on_gpu) {
    sqz_tensor tensor = runtime::f32_tensor(data, shape_, dims);
    if (on_gpu) tensor.data = on_device;
    tensor.device_type = on_gpu ? 2 : 1;
    return tensor;
  }

  const DType dtype_;
  int64_t tokens_, shape_[3], strides_[2];
  std::vector<float> q_, out_, lse_;
  DeviceArray<std::byte> device_q_, device_out_;
  DeviceArray<float> device_lse_;
  sqz_tensor q_tensor_, out_tensor_, lse_tensor_;
};

inline std::vector<float> queries(int64_t tokens, int64_t query_heads, uint64_t seed = 3) {
  return testing::Random(seed).normals(tokens * query_heads * kDim);
}

}  // namespace sqz::cuda::test
