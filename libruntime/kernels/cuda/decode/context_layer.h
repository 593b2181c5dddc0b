// A layer of one of several contexts, in device memory: of a slot, and of each row of a call, which
// is a request with one of its contexts.
#pragma once

#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"

namespace sqz::cuda {

struct LayerMaps;

struct alignas(16) ContextLayer {
  AttendLayer keys;
  LookupLayer lookup;               // levels 0: nothing is looked up, every slot is read
  const LayerMaps* maps = nullptr;  // of keys of 16 bits, for wgmma; device memory
  int64_t skippable = 0;            // first exact keys that a request may leave out
  int32_t turns = 0;                // 1: queries may be turned to where the context begins
  int32_t row = 0;                  // of a row: where decode_attend() writes its result
  uint32_t fault = 0;               // of a row, 1: its slot is empty, or does not do what is asked
};

}  // namespace sqz::cuda
