// Reductions and scans over a warp or a block, in an order that depends on nothing.
#pragma once

#include <cstdint>

#include "libruntime/kernels/cuda/common/scores.cuh"

namespace sqz::cuda {

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

template <class T>
__device__ __forceinline__ T warp_minimum(T value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(~0u, value, offset);
    value = other < value ? other : value;
  }
  return value;
}

// Exclusive prefix sum of one value a thread, and the total. All threads of a block of 1024.
struct Scan {
  uint32_t before, total;
};

__device__ inline Scan block_scan_1024(uint32_t value) {
  __shared__ uint32_t sums[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t inclusive = scan_warp(value);
  __syncthreads();  // sums may still be read from the call before
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  const uint32_t of_warp = sums[lane];
  return {__reduce_add_sync(~0u, lane < warp ? of_warp : 0) + inclusive - value,
          __reduce_add_sync(~0u, of_warp)};
}

}  // namespace sqz::cuda
