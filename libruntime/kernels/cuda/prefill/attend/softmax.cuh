// The online softmax of a warp's 16 rows, in registers. Accumulators have the layout of mma and
// wgmma: the four lanes of a quad share rows r and r + 8 and hold two adjacent columns of every
// eight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda::prefill {

// Beyond the largest number it is that.
template <class T>
__device__ __forceinline__ uint32_t pack_result(float low, float high) {
  constexpr DType kType = std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16;
  return ElementOf<T>::pack(saturated(kType, low), saturated(kType, high));
}

// A row's maximum is moved only when a logit exceeds it by this power of two: weights of up to
// 2^8 cost little precision and rescaling becomes rare. Small tiles move it always: the weight of a
// row's heaviest key is then 1, which is not rounded, in whichever tile it is.
constexpr float slack_of(int keys) {
  return keys > 64 ? 8 : 0;
}

struct RowEnd {
  float inverse;  // 1 / sum of weights; 0 of no keys
  float lse;      // natural log; -infinity of no keys
};

template <int kKeys>
class Softmax {
 public:
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

  // `scale`: of the logits, to base 2. Logits into weights relative to the rows' maxima. True, for
  // the whole warp, if a maximum moved: then rescale() what was weighted before.
  __device__ __forceinline__ bool weigh(float (&logits)[kKeys / 2], float scale) {
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
      maximum[half] = fmaxf(m0, m1) * scale;  // of this lane's columns
    }
    constexpr float kSlack = slack_of(kKeys);
    const bool moves = maximum[0] > shift_[0] + kSlack || maximum[1] > shift_[1] + kSlack;
    const bool moved = __any_sync(~0u, moves);
    if (moved) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float shift = fmaxf(shift_[half], maximum[half]);
        shift = fmaxf(shift, __shfl_xor_sync(~0u, shift, 1));
        shift = fmaxf(shift, __shfl_xor_sync(~0u, shift, 2));
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
          logit = ptx::ex2_approx(fmaf(logit, scale, -shift));
          sums[e] += logit;
        }
      }
      sum_[half] += sums[0] + sums[1];
    }
    return moved;
  }

  // Weights as wgmma's A operand.
  template <class T>
  __device__ __forceinline__ void pack(const float (&weights)[kKeys / 2],
                                       uint32_t (&packed)[kKeys / 16][4]) const {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        packed[k][i] = ElementOf<T>::pack(weights[8 * k + 2 * i], weights[8 * k + 2 * i + 1]);
      }
    }
  }

  template <int kOwn>
  __device__ __forceinline__ void rescale(float (&out)[kOwn]) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) out[i] *= factor_[(i >> 1) & 1];
  }

  // Ends row r + 8 half, with these values. NaN if a value is beyond float32, or the maximum beyond
  // `most`.
  template <int kOwn>
  __device__ __forceinline__ RowEnd finish(int half, const float (&out)[kOwn],
                                           float most = INFINITY) const {
    const float shift = shift_[half];
    float sum = shift == -INFINITY || fabsf(shift) <= most ? sum_[half] : NAN;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i / 2 % 2 == half) sum += 0 * out[i];
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (sum == 0) return {0.0f, -INFINITY};
    constexpr float kLn2 = 0.69314718055994531f;
    return {1.0f / sum, shift * kLn2 + logf(sum)};
  }

 private:
  float shift_[2] = {-INFINITY, -INFINITY}, sum_[2] = {0, 0}, factor_[2] = {1, 1};
};

}  // namespace sqz::cuda::prefill
