// cp.async.bulk: consecutive bytes from global to shared memory by the copy engine, counted on an
// mbarrier.
#pragma once

#include <cstdint>

#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"

namespace sqz::cuda::ptx {

// Both sides 16-byte aligned, `bytes` a multiple of 16.
__device__ __forceinline__ void cp_async_bulk(void* shared, const void* global, uint32_t bytes,
                                              uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace sqz::cuda::ptx
