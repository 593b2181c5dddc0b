// A load that sees what another block wrote before it changed the value.
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

__device__ __forceinline__ uint32_t ld_acquire(const uint32_t* from) {
  uint32_t out;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(out) : "l"(from) : "memory");
  return out;
}

}  // namespace sqz::cuda::ptx
