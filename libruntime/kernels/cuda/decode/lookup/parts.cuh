// What the lookup is put together from: sums of exponentials, the order of scores, the end of a
// pair's lists.
#pragma once

#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode/lookup/team.cuh"

namespace sqz::cuda {

// Adds l 2^m to sum 2^maximum.
__device__ inline void add_sums(float& maximum, float& sum, float m, float l) {
  const float top = fmaxf(maximum, m);
  sum = sum * exp2f(maximum - top) + l * exp2f(m - top);
  maximum = top;
}

// The sums of the four lanes that have a query row between them, into each.
__device__ inline void add_sums_of_lanes(float& maximum, float& sum) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const float m = __shfl_xor_sync(~0u, maximum, step), l = __shfl_xor_sync(~0u, sum, step);
    add_sums(maximum, sum, m, l);
  }
}

// Greater scores have greater ranks; -infinity has the least.
__device__ inline uint32_t rank_of(float score) {
  const uint32_t bits = __float_as_uint(score);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
// The other way.
__device__ inline float score_of(uint32_t rank) {
  return __uint_as_float((rank & 0x80000000u) != 0 ? rank ^ 0x80000000u : ~rank);
}

// {the bin at which the sum of sizes passes `left`, or kRadixBins; what is left before it}, best
// bin first. Every lane of a warp, 8 bins each.
__device__ inline uint2 find_cutoff(const uint32_t (&sizes)[kRadixBins], int lane, uint32_t left) {
  const auto* words = reinterpret_cast<const uint4*>(sizes) + 2 * lane;
  const uint4 a = words[0], b = words[1];
  // Sums up to and with each bin.
  const uint32_t upto[8] = {a.x,
                            a.x + a.y,
                            a.x + a.y + a.z,
                            a.x + a.y + a.z + a.w,
                            a.x + a.y + a.z + a.w + b.x,
                            a.x + a.y + a.z + a.w + (b.x + b.y),
                            a.x + a.y + a.z + a.w + (b.x + b.y + b.z),
                            a.x + a.y + a.z + a.w + (b.x + b.y + b.z + b.w)};
  uint32_t scan = upto[7];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t up = __shfl_up_sync(~0u, scan, step);
    scan += lane >= step ? up : 0;
  }
  const unsigned passes = __ballot_sync(~0u, scan > left);
  const int cutoff = passes == 0 ? 31 : __ffs(static_cast<int>(passes)) - 1;
  const uint32_t before = scan - upto[7];
  uint32_t bin = 8 * lane, fitting = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool fits = before + upto[i] <= left;
    bin += fits ? 1 : 0;
    fitting = max(fitting, fits ? upto[i] : 0);
  }
  return make_uint2(__shfl_sync(~0u, bin, cutoff),
                    left - __shfl_sync(~0u, before + fitting, cutoff));
}

// One thread of a team, when its blocks write runs: where these end, totals, counters. `all`: runs
// and keys; `centroids`: read to decide, if they are not counted elsewhere.
__device__ inline void end_lists(const LookupParams& params, int64_t pair, int head, Sums all,
                                 uint32_t centroids) {
  const RunLists& lists = params.lists;
  lists.before[pair * (lists.capacity + 1) + all.a] = all.b;
  lists.totals[pair] = {all.a, all.b, 0, 0};
  if (head == 0) atomicAdd(&params.counters[0], 1ull);
  atomicAdd(&params.counters[1], static_cast<unsigned long long>(all.b));
  if (centroids == 0) return;
  atomicAdd(&params.counters[2], static_cast<unsigned long long>(centroids));
}

// Of a pair with a logit that is NaN or infinite: nothing is selected, and nothing counted.
__device__ inline void end_with_fault(const LookupParams& params, int64_t pair) {
  params.lists.totals[pair] = {0, 0, 1, 0};
}

}  // namespace sqz::cuda
