// Tile sizes and the shared-memory plan of the assign kernel for compute capability 10.0.
#pragma once

#include <cstdint>

namespace sqz::cuda::sm100 {

inline constexpr int kBlockRows = 128;  // points of a block: a lane of tensor memory each
inline constexpr int kSearchWarps = 4;  // 32 points each
inline constexpr int kThreads = 32 * kSearchWarps + 64;  // a warp that fetches, one that multiplies
inline constexpr int kAccumulators = 2;                  // one is searched, one multiplied
inline constexpr int kSharedLimit = 232448;              // of a block, compute capability 10.0

template <int kDimArg>
struct Config {
  static constexpr int kDim = kDimArg;
  static constexpr int kTile = kDim == 256 ? 64 : 128;    // centroids of a tile
  static constexpr int kRowBytes = kDim % 64 ? 64 : 128;  // of a swizzled row
  static constexpr int kChunk = kRowBytes / 2;            // elements of it
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kPointBytes = kBlockRows * kDim * 2;
  static constexpr int kTileBytes = kTile * kDim * 2;
  static constexpr int kFit = (kSharedLimit - 1024 - kPointBytes) / kTileBytes;
  static constexpr int kStages = kFit < 6 ? kFit : 6;
  static constexpr uint32_t kColumns = kAccumulators * kTile;  // of tensor memory
  static_assert(kDim % kChunk == 0 && kStages >= 2);
};

template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t points[Config::kChunks][kBlockRows * Config::kRowBytes];
  alignas(
      1024) uint8_t centroids[Config::kStages][Config::kChunks][Config::kTile * Config::kRowBytes];
  uint64_t points_full, points_empty;
  uint64_t full[Config::kStages], empty[Config::kStages];
  uint64_t done[kAccumulators], taken[kAccumulators];  // products, and their search
  uint32_t columns;                                    // of tensor memory: the first
};

}  // namespace sqz::cuda::sm100
