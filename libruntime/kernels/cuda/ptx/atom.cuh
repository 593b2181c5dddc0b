// atom.*: what plain atomics leave to fences.
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

// Counts up to `last`, then from 0 again; returns the count before. What the block wrote before its
// barrier is seen by those that find a later count, after theirs.
__device__ __forceinline__ uint32_t atom_inc_acq_rel(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

}  // namespace sqz::cuda::ptx
