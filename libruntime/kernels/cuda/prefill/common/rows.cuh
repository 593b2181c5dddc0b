// From a row of a tile to its query.
#pragma once

#include "libruntime/kernels/cuda/prefill/common/tiles.h"

namespace sqz::cuda {

__device__ __forceinline__ int2 block_of(const QueryBlocks& blocks, int32_t block) {
  if (blocks.table != nullptr) return blocks.table[block];
  const int32_t first = block * blocks.block_tokens;
  return make_int2(first, min(blocks.block_tokens, blocks.tokens - first));
}

// Index of row `row` of tile `tile` of a block in [T, Hkv, group]; -1 for a row that is none.
__device__ __forceinline__ int64_t query_index(const QueryTiles& tiles, int2 block, int32_t kv_head,
                                               int32_t kv_heads, int32_t group, int32_t tile,
                                               int32_t row) {
  const int32_t within = row / tiles.heads;
  const int32_t token = tile * tiles.tokens + within;
  if (within >= tiles.tokens || token >= block.y) return -1;
  return (static_cast<int64_t>(block.x + token) * kv_heads + kv_head) * group + row % tiles.heads;
}

}  // namespace sqz::cuda
