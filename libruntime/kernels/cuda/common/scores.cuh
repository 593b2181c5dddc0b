// Sums of exponentials, and the order of scores.
#pragma once

#include <cstdint>

#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda {

inline constexpr float kLowestLogit = -3.0e38f;  // differences stay finite

// Two counts that are added up together.
struct Sums {
  uint32_t a = 0, b = 0;
};

// The sum of the lanes of a warp up to this one and with it.
template <class T>
__device__ __forceinline__ T scan_warp(T value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T up = __shfl_up_sync(~0u, value, step);
    value += (threadIdx.x & 31) >= step ? up : T{0};
  }
  return value;
}

// Adds l 2^m to sum 2^maximum; a NaN stays.
__device__ inline void add_sums(float& maximum, float& sum, float m, float l) {
  const float top = fmaxf(maximum, m);
  sum = sum * ptx::ex2_approx(maximum - top) + l * ptx::ex2_approx(m - top);
  maximum = top;
}

// The sums of neighbouring lanes, four that have a query row between them or as many as are named,
// into each.
template <int kLanes = 4>
__device__ inline void add_sums_of_lanes(float& maximum, float& sum) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const float m = __shfl_xor_sync(~0u, maximum, step), l = __shfl_xor_sync(~0u, sum, step);
    add_sums(maximum, sum, m, l);
  }
}

// Greater scores have greater ranks; -infinity has the least.
__device__ inline uint32_t rank_of(float score) {
  const uint32_t bits = __float_as_uint(score);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace sqz::cuda
