// Global memory into the L2 cache.
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

// A line of 128 bytes.
__device__ __forceinline__ void prefetch_l2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// Consecutive bytes, by the copy engine: 16-byte aligned, and a multiple of 16.
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}

}  // namespace sqz::cuda::ptx
