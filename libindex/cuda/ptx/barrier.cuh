// barrier.cta (bar): named barriers of a block.
#pragma once

namespace sqz::cuda::ptx {

// Waits until kThreads threads, this one's warp among them, have come to barrier `id`.
template <int kThreads>
__device__ __forceinline__ void barrier_sync(int id) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Counts as having come, without waiting.
template <int kThreads>
__device__ __forceinline__ void barrier_arrive(int id) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace sqz::cuda::ptx
