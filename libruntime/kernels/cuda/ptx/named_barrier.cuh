// bar.*: the sixteen numbered barriers of a block. Number 0 is __syncthreads().
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace sqz::cuda::ptx
