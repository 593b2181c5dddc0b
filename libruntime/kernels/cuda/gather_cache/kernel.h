// An engine's keys and values of a layer, in token order and perhaps in pages, as an index has
// them: clustered keys in slot order and exact keys by themselves.
#pragma once

#include "libruntime/kernels/cuda/decode_attend/kernel.h"

namespace sqz::cuda {

struct GatherParams {
  CacheSource cache;
  int32_t kv_heads = 0, dim = 0;
  int64_t slots = 0, exact = 0;  // M, E
  void* keys = nullptr;          // [Hkv, M, d]
  void* values = nullptr;        // [Hkv, M, d]
  void* exact_keys = nullptr;    // [Hkv, E, d]
  void* exact_values = nullptr;  // [Hkv, E, d]
};

Status gather_cache(const GatherParams& params, int multiprocessors, cudaStream_t stream);

}  // namespace sqz::cuda
