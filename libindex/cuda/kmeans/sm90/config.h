// Tile sizes and the shared-memory plan of the Hopper assign kernel.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sqz::cuda::sm90 {

inline constexpr int kSlots = 2;              // 128-row halves of a block of points
inline constexpr int kSlotRows = 128;         // 64 for each of the two consumer warpgroups
inline constexpr int kBlockRows = kSlots * kSlotRows;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kConsumerThreads = 32 * kConsumerWarps;
inline constexpr int kTurn = 1;  // named barrier of the first consumer warpgroup, then the second's
inline constexpr int kThreads = 128 + kConsumerThreads;  // a producer warpgroup in front
inline constexpr int kProducerRegisters = 24;
inline constexpr int kConsumerRegisters = 240;
inline constexpr int kSharedLimit = 232448;  // of a block, compute capability 9.0

// The points of a block stay in registers as the A operand, loaded once, where two slots fit beside
// the accumulators; at d = 256 they stay in shared memory.
template <int kDimArg, int kTileArg>
struct Config {
  static constexpr int kDim = kDimArg;
  static constexpr bool kPointsInRegisters = kDim <= 128;
  static constexpr int kTile = kTileArg;                  // centroids of a tile: wgmma's N
  static constexpr int kRowBytes = kDim % 64 ? 64 : 128;  // of a swizzled row
  static constexpr int kChunk = kRowBytes / 2;            // elements of it
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kSteps = kDim / 16;  // wgmma's K
  static constexpr int kPointBytes = kBlockRows * kDim * 2;
  static constexpr int kTileBytes = kTile * kDim * 2;
  static constexpr int kStages =
      (kSharedLimit - 1024 - kPointBytes) / kTileBytes < 8
          ? (kSharedLimit - 1024 - kPointBytes) / kTileBytes
          : 8;
  static_assert(kDim % kChunk == 0 && kTile % 8 == 0 && kStages >= 2);
};

template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t points[kSlots][Config::kChunks][kSlotRows * Config::kRowBytes];
  alignas(1024) uint8_t centroids[Config::kStages][Config::kChunks]
                                 [Config::kTile * Config::kRowBytes];
  uint64_t points_full, points_empty;
  uint64_t full[Config::kStages], empty[Config::kStages];
};

}  // namespace sqz::cuda::sm90
