// fence.proxy.tensormap: what wrote a tensor map in global memory before the copy engine's use of
// it.
#pragma once

namespace sqz::cuda::ptx {

__device__ __forceinline__ void fence_proxy_tensormap_acquire(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

}  // namespace sqz::cuda::ptx
