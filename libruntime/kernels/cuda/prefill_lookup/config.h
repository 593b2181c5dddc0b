// Tile sizes and the shared-memory plan of the Hopper lookup kernels, and the work that they take.
#pragma once

#include <cstdint>

#include "libruntime/kernels/cuda/prefill_common/tiles.h"

namespace sqz::cuda::prefill {

// A row and a column of a product cost about as many cycles of the unit for exponentials as of the
// tensor cores, so that both must be busy all the time: four consumer warpgroups of 64 rows hide
// each other's latencies better than two of 128.
inline constexpr int kLookupRows = 256;  // of a tile of queries, 64 a consumer warpgroup
inline constexpr int kLookupConsumerWarps = 16;
inline constexpr int kLookupThreads = 128 + 32 * kLookupConsumerWarps;
inline constexpr int kLookupProducerRegisters = 32;
inline constexpr int kLookupConsumerRegisters = 112;
inline constexpr int kLookupSharedLimit = 232448;
inline constexpr int kPieceTiles = 20;  // tiles of centroids of an item, at most
inline constexpr int kColumnStages = 2;
inline constexpr float kLookupSlack = 8;  // see prefill_attend/config.h

// What a pass over queries and centroids leaves.
enum class Pass {
  kRowSums,     // log of the denominators: a state a row
  kColumnSums,  // sum of S over the rows of a tile, a number a cluster
  kColumnMaxima,
};

// A tile of query rows against positions [begin, end) of a list of clusters.
struct alignas(16) LookupItem {
  int32_t list, block, kv_head;
  int32_t row_tile;    // tile * heads apart + head
  int32_t tile, head;  // of the block; first head within the group
  int32_t begin, end;
  int32_t piece;
  int32_t unused[3];
};
static_assert(sizeof(LookupItem) == 48);

template <int kDimArg, int kTileArg>
struct LookupConfig {
  static constexpr int kDim = kDimArg;
  static constexpr int kTile = kTileArg;  // centroids of a tile: wgmma's N
  static constexpr bool kQueriesInRegisters = kDim <= 128;
  static constexpr int kChunks = (kDim + 63) / 64;
  static constexpr int kFirstChunks = (kChunks + 1) / 2;  // those that the first warp fetches
  static constexpr int kSteps = kDim / 16;
  static constexpr int kQueryBytes = kLookupRows * kChunks * kRowBytes;
  static constexpr int kTileBytes = kTile * kChunks * kRowBytes;
  static constexpr int kColumnBytes = kColumnStages * kLookupConsumerWarps * kTile * 4;
  static constexpr int kFit =
      (kLookupSharedLimit - 4096 - kQueryBytes - kColumnBytes) / (kTileBytes + kTile * 4);
  static constexpr int kStages = kFit < 6 ? kFit : 6;
  static_assert(kTile % 16 == 0 && kStages >= 2);
};

template <class Config>
struct LookupStorage {
  alignas(1024) uint8_t queries[Config::kQueryBytes];                    // [chunk][row][kRowBytes]
  alignas(1024) uint8_t centroids[Config::kStages][Config::kTileBytes];  // [chunk][key][kRowBytes]
  alignas(16) float sizes[Config::kStages][Config::kTile];
  alignas(16) float columns[kColumnStages][kLookupConsumerWarps][Config::kTile];
  float lse[kLookupRows];
  int32_t empty_clusters[Config::kStages];  // whether a tile has columns that do not count
  LookupItem items[2];
  uint64_t item_full[2], item_empty[2];
  uint64_t queries_full, queries_empty;
  uint64_t full[Config::kStages], empty[Config::kStages];
  uint64_t columns_full[kColumnStages], columns_empty[kColumnStages];
};

}  // namespace sqz::cuda::prefill
