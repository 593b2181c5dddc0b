// Tile sizes of the assign kernel for any GPU from compute capability 8.0.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sqz::cuda::sm80 {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kBlockRows = 16 * kWarps;  // points of a block, 16 a warp, in registers
inline constexpr int kTile = 64;                // centroids of a tile
inline constexpr int kStages = 2;

template <int kDimArg>
struct Config {
  static constexpr int kDim = kDimArg;
  static constexpr int kSteps = kDim / 16;         // mma's K
  static constexpr int kRowBytes = 2 * kDim + 16;  // padded: ldmatrix reads without bank conflicts
  static_assert(kDim % 16 == 0);
};

template <class Config>
struct SharedStorage {
  alignas(16) uint8_t centroids[kStages][kTile * Config::kRowBytes];
};

}  // namespace sqz::cuda::sm80
