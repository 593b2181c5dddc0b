// cp.async.bulk.tensor of four dimensions; see cp_async_bulk_tensor.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"

namespace sqz::cuda::ptx {

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
