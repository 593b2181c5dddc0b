// Adds up a tile of products in the registers of a warpgroup. Accumulators have wgmma's
// layout: the four lanes of a quad share rows r and r + 8 and hold two adjacent columns of every
// eight.
#pragma once

#include "libruntime/kernels/cuda/common/scores.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/sm90/config.h"

namespace sqz::cuda::prefill {

// sum_j N_j 2^(x_j) of two rows, relative to a power of two that hardly ever moves: no maximum is
// looked for as long as the sum is neither large nor so small that terms were lost.
class RowSums {
 public:
  // sizes: [N] of the tile, in shared memory. Columns of size 0 do not count, whatever their logit.
  template <int N>
  __device__ __forceinline__ void add(const float (&logits)[N / 2], const float* sizes,
                                      float scale) {
    const float2* pairs = reinterpret_cast<const float2*>(sizes) + (threadIdx.x & 3);
    float sums[2][2] = {};
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const float2 size = pairs[4 * j];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* logit = logits + 4 * j + 2 * half;
        sums[half][0] =
            fmaf(ptx::ex2_approx(fmaf(logit[0], scale, -shift_[half])), size.x, sums[half][0]);
        sums[half][1] =
            fmaf(ptx::ex2_approx(fmaf(logit[1], scale, -shift_[half])), size.y, sums[half][1]);
      }
    }
    const float first = sum_[0] + (sums[0][0] + sums[0][1]);
    const float second = sum_[1] + (sums[1][0] + sums[1][1]);
    if (__all_sync(~0u, in_range(first) && in_range(second))) {
      sum_[0] = first;
      sum_[1] = second;
    } else {
      move<N>(logits, pairs, scale);
    }
  }

  // State of row r + 8 half over the quad's columns, in all its lanes.
  __device__ __forceinline__ float2 finish(int half) const {
    // A sum of nothing has no power that others would have to follow.
    float shift = sum_[half] == 0 ? kLowestLogit : shift_[half], sum = sum_[half];
    add_sums_of_lanes(shift, sum);
    return make_float2(shift, sum);
  }

 private:
  // False of NaN, too.
  static __device__ __forceinline__ bool in_range(float sum) {
    return sum > 0x1p-40f && sum < 0x1p64f;
  }

  // add() with a shift at the largest logit of a column that counts.
  template <int N>
  __device__ void move(const float (&logits)[N / 2], const float2* pairs, float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float shift = sum_[half] == 0 ? -INFINITY : shift_[half] + log2f(sum_[half]);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        const float2 size = pairs[4 * j];
        const float* logit = logits + 4 * j + 2 * half;
        if (size.x > 0) shift = fmaxf(shift, logit[0] * scale);
        if (size.y > 0) shift = fmaxf(shift, logit[1] * scale);
      }
      if (shift == -INFINITY) shift = 0;  // nothing counts, or NaN does and must show
      float sum = sum_[half] == 0 ? 0.0f : sum_[half] * ptx::ex2_approx(shift_[half] - shift);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        const float2 size = pairs[4 * j];
        const float* logit = logits + 4 * j + 2 * half;
        if (size.x > 0) sum = fmaf(ptx::ex2_approx(fmaf(logit[0], scale, -shift)), size.x, sum);
        if (size.y > 0) sum = fmaf(ptx::ex2_approx(fmaf(logit[1], scale, -shift)), size.y, sum);
      }
      shift_[half] = shift;
      sum_[half] = fabsf(shift) <= kMostLogit ? sum : NAN;
    }
  }

  // Each lane keeps its own: only its own columns.
  float shift_[2] = {0, 0}, sum_[2] = {0, 0};
};

}  // namespace sqz::cuda::prefill
