// The online softmax of a warpgroup's 64 rows, in registers. Accumulators have wgmma's layout: the
// four lanes of a quad share rows r and r + 8 and hold two adjacent columns of every eight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/prefill/attend/sm90/config.h"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda::prefill {

template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// As pack_pair(); beyond the largest number it is that.
template <class T>
__device__ __forceinline__ uint32_t pack_result(float low, float high) {
  constexpr DType kType = std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16;
  return pack_pair<T>(saturated(kType, low), saturated(kType, high));
}

struct RowEnd {
  float inverse;  // 1 / sum of weights; 0 of no keys
  float lse;      // natural log; -infinity of no keys
};

template <class T, int kKeys>
class Softmax {
 public:
  explicit __device__ __forceinline__ Softmax(float scale) : scale_(scale) {}

  // The result of row r + 8 half becomes NaN.
  __device__ __forceinline__ void spoil(int half) { sum_[half] = NAN; }

  // Columns from `valid` on become -infinity.
  __device__ __forceinline__ void mask(float (&logits)[kKeys / 2], int valid) const {
    const int first = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * j + first + e >= valid) logits[4 * j + e] = logits[4 * j + 2 + e] = -INFINITY;
      }
    }
  }

  // Logits into weights relative to the rows' maxima. True, for the whole warp, if a maximum moved:
  // then rescale() what was weighted before.
  __device__ __forceinline__ bool weigh(float (&logits)[kKeys / 2]) {
    float maximum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m0 = fmaxf(logits[2 * half], logits[2 * half + 1]);
      float m1 = fmaxf(logits[4 + 2 * half], logits[4 + 2 * half + 1]);
#pragma unroll
      for (int j = 2; j < kKeys / 8; j += 2) {
        m0 = fmaxf(m0, fmaxf(logits[4 * j + 2 * half], logits[4 * j + 2 * half + 1]));
        m1 = fmaxf(m1, fmaxf(logits[4 * j + 4 + 2 * half], logits[4 * j + 5 + 2 * half]));
      }
      float m = fmaxf(m0, m1);
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      maximum[half] = m * scale_;
    }
    constexpr float kSlack = slack_of(kKeys);
    const bool moves = maximum[0] > shift_[0] + kSlack || maximum[1] > shift_[1] + kSlack;
    const bool moved = __any_sync(~0u, moves);
    if (moved) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = fmaxf(shift_[half], maximum[half]);
        // Without keys so far any factor will do, but not -inf - -inf.
        factor_[half] = shift == -INFINITY ? 1.0f : ptx::ex2_approx(shift_[half] - shift);
        shift_[half] = shift;
        sum_[half] *= factor_[half];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shift = shift_[half] == -INFINITY ? 0.0f : shift_[half];
      float sums[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& logit = logits[4 * j + 2 * half + e];
          logit = ptx::ex2_approx(fmaf(logit, scale_, -shift));
          sums[e] += logit;
        }
      }
      sum_[half] += sums[0] + sums[1];
    }
    return moved;
  }

  // Weights as wgmma's A operand.
  __device__ __forceinline__ void pack(const float (&weights)[kKeys / 2],
                                       uint32_t (&packed)[kKeys / 16][4]) const {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        packed[k][i] = pack_pair<T>(weights[8 * k + 2 * i], weights[8 * k + 2 * i + 1]);
      }
    }
  }

  template <int kDim>
  __device__ __forceinline__ void rescale(float (&out)[kDim / 2]) const {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i] *= factor_[(i >> 1) & 1];
  }

  // Ends row r + 8 half, with these values. NaN if a value is beyond float32, or the maximum is
  // beyond kMostLogit.
  template <int kDim>
  __device__ __forceinline__ RowEnd finish(int half, const float (&out)[kDim / 2]) const {
    const float shift = shift_[half];
    float sum = shift == -INFINITY || fabsf(shift) <= kMostLogit ? sum_[half] : NAN;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      if (i / 2 % 2 == half) sum += 0 * out[i];
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (sum == 0) return {0.0f, -INFINITY};
    constexpr float kLn2 = 0.69314718055994531f;
    return {1.0f / sum, shift * kLn2 + logf(sum)};
  }

 private:
  float scale_;  // of the logits, to base 2
  float shift_[2] = {-INFINITY, -INFINITY}, sum_[2] = {0, 0}, factor_[2] = {1, 1};
};

}  // namespace sqz::cuda::prefill
