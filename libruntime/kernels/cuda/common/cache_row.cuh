// Where an engine's cache has a key.
#pragma once

#include "libruntime/kernels/cuda/decode/attend/kernel.h"

namespace sqz::cuda {

// Row of the token in the cache: its place in the page times pages before it. Positions and pages
// that are out of bounds are read as the last token and as page 0.
__device__ __forceinline__ uint32_t cache_row(const CacheSource& cache, int64_t token) {
  token = min(token, cache.tokens - 1);
  if (cache.block_table == nullptr) return static_cast<uint32_t>(token);
  const int64_t page = cache.block_table[token >> cache.page_shift];
  const int64_t sound = page >= 0 && page < cache.pages ? page : 0;
  return static_cast<uint32_t>(sound << cache.page_shift |
                               (token & ((int64_t{1} << cache.page_shift) - 1)));
}

// Token of an exact key: the first ones are the sink's, the others the last of the context.
__device__ __forceinline__ int64_t exact_token(const CacheSource& cache, int64_t exact, int64_t e) {
  return e < cache.sink ? e : cache.tokens - exact + e;
}

// Bytes from the start of keys or values to a row of a head.
__device__ __forceinline__ int64_t cache_bytes(const CacheSource& cache, uint32_t row, int head) {
  const int64_t page = row >> cache.page_shift;
  const int64_t within = row & ((1u << cache.page_shift) - 1);
  return 2 * (page * cache.page_stride + head * cache.head_stride + within * cache.token_stride);
}

}  // namespace sqz::cuda
