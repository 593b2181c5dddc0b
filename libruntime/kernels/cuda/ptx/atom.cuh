// atom.acq_rel.gpu: counters of arrivals. What a block wrote before its barrier is
// seen by those that find a later count, after theirs.
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

// Returns the count before.
__device__ __forceinline__ uint32_t atom_add_acq_rel(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(value)
               : "memory");
  return before;
}

}  // namespace sqz::cuda::ptx
