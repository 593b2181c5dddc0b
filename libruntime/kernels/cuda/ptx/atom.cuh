// atom.acq_rel.gpu, ld.acquire.gpu: counters of arrivals. What a block wrote before its barrier is
// seen by those that find a later count, after theirs.
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

// Both return the count before.
__device__ __forceinline__ uint32_t atom_add_acq_rel(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(value)
               : "memory");
  return before;
}

// Counts up to `last`, then from 0 again.
__device__ __forceinline__ uint32_t atom_inc_acq_rel(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(last)
               : "memory");
  return before;
}

// Sees what another block wrote before it changed the value.
__device__ __forceinline__ uint32_t ld_acquire(const uint32_t* from) {
  uint32_t out;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(out) : "l"(from) : "memory");
  return out;
}

}  // namespace sqz::cuda::ptx
