// From a row of a tile to its query, and from a block to its layer.
#pragma once

#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/decode/context_layer.h"
#include "libruntime/kernels/cuda/prefill/common/tiles.h"

namespace sqz::cuda {

__device__ __forceinline__ int2 block_of(const QueryBlocks& blocks, int32_t block) {
  if (blocks.table != nullptr) return blocks.table[block];
  const int32_t first = block * blocks.block_tokens;
  return make_int2(first, min(blocks.block_tokens, blocks.tokens - first));
}

// The layer of a block's own; null: the call's parameters have it.
__device__ __forceinline__ const ContextLayer* own_layer(const PrefillAttend& call, int32_t block) {
  return call.own == nullptr ? nullptr : call.own + block_of(call.blocks, block).x;
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

// Adds eight numbers of 16 bits to `most`: the largest size, as bits, of numbers at even places and
// of numbers at odd places.
__device__ __forceinline__ uint32_t larger(uint32_t most, const uint4& words) {
  const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (const uint32_t word : all) most = __vmaxu2(most, word & 0x7FFF7FFFu);
  return most;
}
// Whether one of the two is NaN, infinite or beyond kMostQuery.
template <class Element>
__device__ __forceinline__ bool is_beyond(uint32_t most, float scale) {
  const float largest = Element::low(max(most >> 16, most & 0xFFFFu));
  return !(largest * fmaxf(scale, 1.0f) <= kMostQuery);
}

// The same of row `row`, which the four lanes of a quad share, of a tile of queries in shared
// memory: [kChunks][kTileRows][kRowBytes].
template <class T, int kChunks, int kTileRows>
__device__ __forceinline__ bool is_row_beyond(const uint8_t* tile, int row, float scale) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 2 * kChunks; ++i) {
    const uint8_t* from = tile + (i / 2 * kTileRows + row) * kRowBytes + i % 2 * (kRowBytes / 2);
    most = larger(most, reinterpret_cast<const uint4*>(from)[threadIdx.x & 3]);
  }
  most = __vmaxu2(most, __shfl_xor_sync(~0u, most, 1));
  most = __vmaxu2(most, __shfl_xor_sync(~0u, most, 2));
  return is_beyond<ElementOf<T>>(most, scale);
}

}  // namespace sqz::cuda
