// cp.async.bulk and what belongs to it: from global to shared memory by the copy engine, bytes
// counted on an mbarrier.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"

namespace sqz::cuda::ptx {

// Consecutive bytes: both sides 16-byte aligned, `bytes` a multiple of 16.
__device__ __forceinline__ void cp_async_bulk(void* shared, const void* global, uint32_t bytes,
                                              uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t createpolicy_evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The box at (x, y, z) of a three-dimensional tensor; what lies outside it arrives as zeros.
__device__ __forceinline__ void cp_async_bulk_tensor_3d(void* shared, const CUtensorMap* map,
                                                        int32_t x, int32_t y, int32_t z,
                                                        uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// The same of a four-dimensional tensor.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(void* shared, const CUtensorMap* map,
                                                        int32_t x, int32_t y, int32_t z, int32_t w,
                                                        uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

}  // namespace sqz::cuda::ptx
