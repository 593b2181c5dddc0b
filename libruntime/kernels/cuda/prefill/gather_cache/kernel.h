// An engine's keys and values of a layer, in token order and perhaps in pages, as an index has
// them: clustered keys in slot order and exact keys by themselves.
#pragma once

#include "libruntime/kernels/cuda/decode/attend/kernel.h"

namespace sqz::cuda {

struct GatheredKeys {
  void* keys = nullptr;          // [Hkv, M, d]
  void* values = nullptr;        // [Hkv, M, d]
  void* exact_keys = nullptr;    // [Hkv, E, d]
  void* exact_values = nullptr;  // [Hkv, E, d]
};

// The cache, M, E and the shape are those of `from`.
Status gather_cache(const AttendParams& from, const GatheredKeys& to, cudaStream_t stream);

}  // namespace sqz::cuda
