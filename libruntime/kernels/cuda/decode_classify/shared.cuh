// Shared memory of a block: a struct, and arrays that depend on the network behind it.
#pragma once

#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode_classify/kernel.h"
#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"

namespace sqz::cuda {

inline constexpr int kStepTiles = 8;  // tiles of weights in a step of a warp: a column of them
inline constexpr int kStepBytes = kStepTiles * kWeightTileBytes;

template <int kDim>
struct ClassifyShared {
  QueryRows<kDim> queries;
  RulesShared rules;
  float cosines[kDim / 2], sines[kDim / 2];
  float maximum[kLookupWarps][kMostGroup], sum[kLookupWarps][kMostGroup];
  float2 sums[kMostTeam][kMostGroup];  // of the blocks: told to the first one
  float lse[kMostGroup];
  float best[kLookupWarps], worst[kLookupWarps];  // scores of the warps
  uint32_t tied;                                  // buckets in the list
  uint32_t fault;
};

// Where the arrays begin, in bytes from the end of the struct; all multiples of 16.
struct ClassifyLayout {
  // Rows of tiles of hidden units and of buckets; how many of them a block has, at most.
  int32_t unit_tiles, bucket_tiles, own_unit_tiles, own_bucket_tiles;
  int32_t hidden_columns;  // columns of tiles of the output weights
  int32_t ring;            // [warps, steps] tiles on their way; then the list of tied buckets
  int32_t activations;     // [hidden_columns, 2, 32] fragments of all hidden units
  int32_t partial;         // [warps, kStepTiles, 32] float2: sums of a warp's columns
  int32_t logits;          // [group, 8 bucket_tiles] base 2: told to the first block
  int32_t scores;          // [C]
  int32_t spans;           // [C] uint2
  int32_t bytes;

  constexpr ClassifyLayout(int hidden, int buckets, int group, int team, int steps) {
    unit_tiles = static_cast<int32_t>(weight_rows(hidden));
    bucket_tiles = static_cast<int32_t>(weight_rows(buckets));
    own_unit_tiles = (unit_tiles + team - 1) / team;
    own_bucket_tiles = (bucket_tiles + team - 1) / team;
    hidden_columns = static_cast<int32_t>(weight_columns(hidden));
    ring = 0;
    activations = ring + kLookupWarps * steps * kStepBytes;
    partial = activations + hidden_columns * 2 * 512;
    logits = partial + kLookupWarps * kStepTiles * 256;
    scores = logits + group * bucket_tiles * 32;
    spans = scores + bucket_tiles * 32;
    bytes = spans + bucket_tiles * 64;
  }
};

}  // namespace sqz::cuda
