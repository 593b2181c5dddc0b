// wgmma.*: a warpgroup's asynchronous matrix product. The products themselves are one struct a
// type and shape, in wgmma_product.cuh.
#pragma once

#include <cstdint>

#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"

namespace sqz::cuda::ptx {

// Orders the warpgroup's register and shared-memory accesses before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of accumulators over this point.
template <int R>
__device__ __forceinline__ void fence_registers(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// An operand in shared memory whose rows of kRowBytes (64 or 128) are swizzled over their own
// length; groups of eight rows follow each other. K-major, or a B operand whose N dimension is
// contiguous (V of attention: rows of keys): chunks of kRowBytes of every row, `chunk_bytes` apart.
template <int kRowBytes>
__device__ __forceinline__ uint64_t matrix_descriptor(const void* operand,
                                                      uint32_t chunk_bytes = 16) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr uint64_t kGroupBytes = 8 * kRowBytes;
  return static_cast<uint64_t>((shared_address(operand) & 0x3FFFF) >> 4) |
         (static_cast<uint64_t>(chunk_bytes >> 4) << 16) | ((kGroupBytes >> 4) << 32) |
         (kSwizzle << 62);
}

// The descriptor of an operand `bytes` further on: its address is in the lower word.
__device__ __forceinline__ uint64_t advanced(uint64_t descriptor, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + (bytes >> 4);
  return (descriptor >> 32 << 32) | low;
}

}  // namespace sqz::cuda::ptx
