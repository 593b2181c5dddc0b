// Sums of exponentials, and the order of scores.
#pragma once

#include <cstdint>

namespace sqz::cuda {

inline constexpr float kLowestLogit = -3.0e38f;  // differences stay finite

// Two counts that are added up together.
struct Sums {
  uint32_t a = 0, b = 0;
};

// Adds l 2^m to sum 2^maximum.
__device__ inline void add_sums(float& maximum, float& sum, float m, float l) {
  const float top = fmaxf(maximum, m);
  sum = sum * exp2f(maximum - top) + l * exp2f(m - top);
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
