// What becomes of a tile of products in the registers of a warpgroup. Accumulators have wgmma's
// layout: the four lanes of a quad share rows r and r + 8 and hold two adjacent columns of every
// eight.
#pragma once

#include "libruntime/kernels/cuda/prefill_lookup/config.h"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda::prefill {

// sum_j N_j 2^(x_j) of two rows, relative to a maximum that moves seldom.
class RowSums {
 public:
  // sizes: [N] of the tile, in shared memory. Columns of size 0 do not count, whatever their logit.
  template <int N>
  __device__ __forceinline__ void add(float (&logits)[N / 2], const float* sizes, bool some_empty,
                                      float scale) {
    const float2* pairs = reinterpret_cast<const float2*>(sizes) + (threadIdx.x & 3);
    if (some_empty) {
      asm volatile("");  // a branch, not selections: it is hardly ever taken
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        const float2 size = pairs[4 * j];
        if (size.x == 0) logits[4 * j] = logits[4 * j + 2] = -INFINITY;
        if (size.y == 0) logits[4 * j + 1] = logits[4 * j + 3] = -INFINITY;
      }
    }
    float maximum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m0 = -INFINITY, m1 = -INFINITY;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        m0 = fmaxf(m0, logits[4 * j + 2 * half]);
        m1 = fmaxf(m1, logits[4 * j + 2 * half + 1]);
      }
      maximum[half] = fmaxf(m0, m1) * scale;
    }
    if (maximum[0] > shift_[0] + kLookupSlack || maximum[1] > shift_[1] + kLookupSlack) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = fmaxf(shift_[half], maximum[half]);
        if (shift != -INFINITY) sum_[half] *= ptx::ex2_approx(shift_[half] - shift);
        shift_[half] = shift;
      }
    }
    const float shifts[2] = {shift_[0] == -INFINITY ? 0.0f : shift_[0],
                             shift_[1] == -INFINITY ? 0.0f : shift_[1]};
    float sums[2][2] = {};
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const float2 size = pairs[4 * j];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* logit = logits + 4 * j + 2 * half;
        sums[half][0] =
            fmaf(ptx::ex2_approx(fmaf(logit[0], scale, -shifts[half])), size.x, sums[half][0]);
        sums[half][1] =
            fmaf(ptx::ex2_approx(fmaf(logit[1], scale, -shifts[half])), size.y, sums[half][1]);
      }
    }
    sum_[0] += sums[0][0] + sums[0][1];
    sum_[1] += sums[1][0] + sums[1][1];
  }

  // State of row r + 8 half over the quad's columns, in all its lanes.
  __device__ __forceinline__ float2 finish(int half) const {
    float2 state = make_float2(shift_[half], sum_[half]);
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
      const float shift = __shfl_xor_sync(~0u, state.x, step);
      const float sum = __shfl_xor_sync(~0u, state.y, step);
      state = add_states(state, make_float2(shift, sum));
    }
    return state;
  }

  static __device__ __forceinline__ float2 add_states(float2 a, float2 b) {
    const float shift = fmaxf(a.x, b.x);
    if (shift == -INFINITY) return make_float2(shift, a.y + b.y);
    return make_float2(shift,
                       a.y * ptx::ex2_approx(a.x - shift) + b.y * ptx::ex2_approx(b.x - shift));
  }

 private:
  // Each lane keeps its own: only its own columns.
  float shift_[2] = {-INFINITY, -INFINITY}, sum_[2] = {0, 0};
};

// 2^(x - lse) of a lane's rows, summed (or their maximum) by column.
template <int N, bool kMaxima>
struct Columns {
  float values[N / 4];  // [j][e]: column 8 j + 2 (lane % 4) + e

  __device__ __forceinline__ void add(const float (&logits)[N / 2], const float (&lse)[2],
                                      float scale) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float upper = ptx::ex2_approx(fmaf(logits[4 * j + e], scale, -lse[0]));
        const float lower = ptx::ex2_approx(fmaf(logits[4 * j + 2 + e], scale, -lse[1]));
        values[2 * j + e] = combine(upper, lower);
      }
    }
  }

  // Over the eight lanes of a warp that hold the same columns; written to to[column].
  __device__ __forceinline__ void store(float* to) {
    halve<N / 4>(16);
    halve<N / 8>(8);
    halve<N / 16>(4);
    const int lane = threadIdx.x & 31;
    const int part = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
    // values[i] is now entry part * (N / 32) + i of what this quad position held.
#pragma unroll
    for (int i = 0; i < N / 32; ++i) {
      const int entry = part * (N / 32) + i;
      to[entry / 2 * 8 + 2 * (lane & 3) + entry % 2] = values[i];
    }
  }

 private:
  static __device__ __forceinline__ float combine(float a, float b) {
    return kMaxima ? fmaxf(a, b) : a + b;
  }

  // Of `kCount` values each lane keeps one half and gives the other to lane ^ distance.
  template <int kCount>
  __device__ __forceinline__ void halve(int distance) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float keep = upper ? values[i + kCount / 2] : values[i];
      const float send = upper ? values[i] : values[i + kCount / 2];
      values[i] = combine(keep, __shfl_xor_sync(~0u, send, distance));
    }
  }
};

}  // namespace sqz::cuda::prefill
