// Merges the partial states of query rows whose keys were split, in the order of the keys.
#pragma once

#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/prefill/common/tiles.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"

namespace sqz::cuda {

// A tile of query rows whose keys were split over `parts` consecutive slots.
struct alignas(16) SplitTile {
  int32_t block, kv_head, tile;
  int32_t slot, parts;
  int32_t unused[3];
};

struct MergeSplits {
  PrefillShape shape;
  QueryBlocks blocks;
  QueryTiles tiles;
  DType dtype = DType::kBF16;  // of out
  void* out = nullptr;         // [T, Hq, d]
  LseRows lse;
  int32_t rows = 0;                    // of a tile
  const float* partial_out = nullptr;  // [slots, rows, d] normalised
  const float* partial_lse = nullptr;  // [slots, rows] natural log
  // In device memory. Null: all tiles, list after list, have `parts` parts.
  const SplitTile* splits = nullptr;
  const uint32_t* count = nullptr;
  int32_t parts = 0;
};

Status merge_splits(const MergeSplits& call, const Device& device, cudaStream_t stream);

}  // namespace sqz::cuda
