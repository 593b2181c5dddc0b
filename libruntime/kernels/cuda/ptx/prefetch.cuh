// A line of 128 bytes of global memory, into the L2 cache.
#pragma once

namespace sqz::cuda::ptx {

__device__ __forceinline__ void prefetch_l2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

}  // namespace sqz::cuda::ptx
