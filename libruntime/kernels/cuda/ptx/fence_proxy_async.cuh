// fence.proxy.async: ordinary accesses of shared memory before those of the copy engine and wgmma.
#pragma once

namespace sqz::cuda::ptx {

__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace sqz::cuda::ptx
