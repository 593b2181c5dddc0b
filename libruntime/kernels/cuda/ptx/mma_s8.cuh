// mma.sync with 8-bit numbers: exact.
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

// d[16, 8] += a[16, 32] b[32, 8]; signed numbers in, 32-bit accumulators.
__device__ __forceinline__ void mma_m16n8k32_s8(int32_t (&d)[4], const uint4& a, uint32_t b0,
                                                uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

}  // namespace sqz::cuda::ptx
