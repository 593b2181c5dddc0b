// The number of a thread in its warp.
#pragma once

namespace sqz::cuda::ptx {

// threadIdx.x % 32, but read once: the compiler reads threadIdx again, slowly, wherever it has few
// registers left.
__device__ __forceinline__ int lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace sqz::cuda::ptx
