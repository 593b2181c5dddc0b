// Thread block clusters and programmatic dependent launch; without effect before Hopper, where the
// launches do not ask for them.
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

// All threads of the cluster; what they wrote before, to global memory too, is seen after it.
__device__ __forceinline__ void barrier_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
}

// barrier_cluster() in two halves, without what it says of memory.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Where a variable of this block's shared memory is in that of the cluster's block `rank`.
__device__ __forceinline__ uint32_t mapa(uint32_t shared, uint32_t rank) {
  uint32_t out = shared;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(shared), "r"(rank));
#endif
  return out;
}

// st.async: writes 8 bytes, aligned, counted on an mbarrier of that block, which must have begun
// and initialised it. Both addresses by mapa().
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

// Waits for the kernels that this one depends on, and sees what they wrote.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel that depends on this one start.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sqz::cuda::ptx
