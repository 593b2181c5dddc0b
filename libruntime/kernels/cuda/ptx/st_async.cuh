// st.async: writes to the shared memory of another block of the cluster, counted on an mbarrier
// there.
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

// 8 bytes, aligned; `address` and `barrier` by mapa(), of the same block, which must have begun and
// initialised the barrier.
__device__ __forceinline__ void st_async_8(uint32_t address, uint32_t a, uint32_t b,
                                           uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(
          address),
      "r"(a), "r"(b), "r"(barrier)
      : "memory");
#endif
}

}  // namespace sqz::cuda::ptx
