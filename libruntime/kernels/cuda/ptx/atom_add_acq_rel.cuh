// atom.add.acq_rel.gpu: counts arrivals. What a thread knew before it, by a barrier of its block,
// too, is known to those that find its count.
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

__device__ __forceinline__ uint32_t atom_add_acq_rel(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(address)), "r"(value)
               : "memory");
  return old;
}

}  // namespace sqz::cuda::ptx
