// Tile sizes and the shared-memory plan of the Hopper assign kernel.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sqz::cuda::sm90 {

inline constexpr int kSlots = 2;       // 128-row halves of a block of points
inline constexpr int kSlotRows = 128;  // 64 for each of the two consumer warpgroups
inline constexpr int kBlockRows = kSlots * kSlotRows;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kLoaderThreads = 96;  // warps 1 to 3 of the producer warpgroup
inline constexpr int kThreads = 128 + 32 * kConsumerWarps;  // a producer warpgroup in front
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kSharedLimit = 232448;  // of a block, compute capability 9.0

// The points of a block stay in registers as the A operand, loaded once, where two slots fit beside
// the accumulators. They can then come in any order: three loader warps bring them row by row to
// shared memory, where padding keeps ldmatrix free of bank conflicts. At d = 256 they stay in
// shared memory, as wgmma wants them, and the copy engine brings them as they lie.
template <int kDimArg, int kTileArg>
struct Config {
  static constexpr int kDim = kDimArg;
  static constexpr bool kPointsInRegisters = kDim <= 128;
  static constexpr int kTile = kTileArg;                  // centroids of a tile: wgmma's N
  static constexpr int kRowBytes = kDim % 64 ? 64 : 128;  // of a swizzled row
  static constexpr int kChunk = kRowBytes / 2;            // elements of it
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kSteps = kDim / 16;  // wgmma's K
  static constexpr int kPointRowBytes = 2 * kDim + (kPointsInRegisters ? 16 : 0);
  static constexpr int kPointBytes = kBlockRows * kPointRowBytes;
  static constexpr int kTileBytes = kTile * kDim * 2;
  static constexpr int kStages = (kSharedLimit - 1024 - kPointBytes) / kTileBytes < 8
                                     ? (kSharedLimit - 1024 - kPointBytes) / kTileBytes
                                     : 8;
  static_assert(kDim % kChunk == 0 && kTile % 8 == 0 && kStages >= 2);
};

template <class Config>
struct SharedStorage {
  // [slot][row][kPointRowBytes], or [slot][chunk][row][kRowBytes] swizzled.
  alignas(1024) uint8_t points[kSlots][kSlotRows * Config::kPointRowBytes];
  alignas(
      1024) uint8_t centroids[Config::kStages][Config::kChunks][Config::kTile * Config::kRowBytes];
  int tile[Config::kStages];  // number of the tile of centroids in each stage
  uint64_t points_full, points_empty;
  uint64_t full[Config::kStages], empty[Config::kStages];
};

}  // namespace sqz::cuda::sm90
