// The number of a thread in its warp, numbers that all threads of a warp have, and pointers.
#pragma once

namespace sqz::cuda::ptx {

// threadIdx.x % 32, but read once: the compiler reads threadIdx again, slowly, wherever it has few
// registers left.
__device__ __forceinline__ int lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A number that is the same in all lanes. Told so, the compiler keeps it and what follows from it,
// addresses and descriptors, in registers of the warp instead of each lane's.
__device__ __forceinline__ int uniform(int number) {
  return __shfl_sync(~0u, number, 0);
}

// A pointer that the compiler keeps, where it would add up its parts anew at each use.
template <class T>
__device__ __forceinline__ T* kept(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

}  // namespace sqz::cuda::ptx
