// Tile sizes and the shared-memory plans of the Hopper lookup kernels, and the work that they take.
//
// The results of a product cost as many cycles of other units as the product does of the tensor
// cores, and every instruction that reads its results slows these: four consumer warpgroups with
// few instructions each, operands in shared memory, their registers for results alone.
#pragma once

#include <cstdint>

#include "libruntime/kernels/cuda/prefill/common/tiles.h"

namespace sqz::cuda::prefill {

inline constexpr int kLookupSharedLimit = 232448;
inline constexpr int kPieceTiles = 20;  // tiles of centroids of an item, at most

// Row tiles of a block and pieces of the clusters of its list: how a pass is cut into items.
struct ItemPlan {
  int32_t row_tiles;  // of a block
  int32_t tokens;     // of a row tile
  int32_t clusters;   // of a tile of centroids
  int32_t pieces;     // of a list, at most
};

// A tile of query rows against positions [begin, end) of a list of clusters.
struct alignas(16) LookupItem {
  int32_t list, block, kv_head;
  int32_t tile;  // of the block
  int32_t begin, end;
  int32_t piece;
  int32_t unused;
};
static_assert(sizeof(LookupItem) == 32);

// The first pass: query rows, the M of products, against tiles of centroids.
inline constexpr int kLookupRows = 256;  // of a tile of queries, 64 a consumer warpgroup
inline constexpr int kRowSumWarps = 16;
inline constexpr int kRowSumThreads = 128 + 32 * kRowSumWarps;
inline constexpr int kRowSumProducerRegisters = 32;
inline constexpr int kRowSumConsumerRegisters = 112;

template <int kDimArg>
struct RowSumConfig {
  static constexpr int kDim = kDimArg;
  static constexpr int kTile = kDim == 256 ? 64 : 128;  // centroids of a tile: wgmma's N
  static constexpr int kChunks = (kDim + 63) / 64;
  static constexpr int kFirstChunks = (kChunks + 1) / 2;  // those that the first warp fetches
  static constexpr int kQueryStages = kDim == 256 ? 1 : 2;
  static constexpr int kQueryBytes = kLookupRows * kChunks * kRowBytes;
  static constexpr int kTileBytes = kTile * kChunks * kRowBytes;
  static constexpr int kFit =
      (kLookupSharedLimit - 1024 - kQueryStages * kQueryBytes) / (kTileBytes + kTile * 4);
  static constexpr int kStages = kFit < 6 ? kFit : 6;
  static_assert(kTile % 32 == 0 && kStages >= 2);
};

template <class Config>
struct RowSumStorage {
  alignas(1024) uint8_t queries[Config::kQueryStages][Config::kQueryBytes];  // [chunk][row][…]
  alignas(1024) uint8_t centroids[Config::kStages][Config::kTileBytes];      // [chunk][key][…]
  alignas(16) float sizes[Config::kStages][Config::kTile];
  LookupItem items[2];
  uint64_t item_full[2], item_empty[2];
  uint64_t queries_full[Config::kQueryStages], queries_empty[Config::kQueryStages];
  uint64_t full[Config::kStages], empty[Config::kStages];
};

// The second pass: tiles of 64 centroids, the M of products, one a warpgroup, against chunks of
// queries.
inline constexpr int kColumnTile = 64;
inline constexpr int kColumnRows = 128;  // queries of a chunk: wgmma's N

template <int kDimArg>
struct ColumnConfig {
  static constexpr int kDim = kDimArg;
  static constexpr int kQueryChunks = kDim == 256 ? 2 : 4;
  static constexpr int kWarpgroups = kDim == 256 ? 2 : 4;  // each holds a stage for a long time
  static constexpr int kThreads = 128 + 128 * kWarpgroups;
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : 112;
  static constexpr int kChunks = (kDim + 63) / 64;
  static constexpr int kFirstChunks = (kChunks + 1) / 2;  // those that the first warp fetches
  static constexpr int kQueryBytes = kColumnRows * kChunks * kRowBytes;  // of a chunk
  static constexpr int kTileBytes = kColumnTile * kChunks * kRowBytes;
  static constexpr int kFit =
      (kLookupSharedLimit - 1024 - kQueryChunks * (kQueryBytes + kColumnRows * 4)) / kTileBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static_assert(kStages > kWarpgroups);
};

template <class Config>
struct ColumnStorage {
  alignas(1024) uint8_t queries[Config::kQueryChunks][Config::kQueryBytes];  // [chunk][row][…]
  alignas(1024) uint8_t centroids[Config::kStages][Config::kTileBytes];      // [chunk][key][…]
  alignas(16) float lse[Config::kQueryChunks][kColumnRows];                  // see lse_place()
  LookupItem items[2];
  uint64_t item_full[2], item_empty[2];
  uint64_t queries_full[Config::kQueryChunks], queries_empty[Config::kQueryChunks];
  uint64_t full[Config::kStages], empty[Config::kStages];
};

}  // namespace sqz::cuda::prefill
