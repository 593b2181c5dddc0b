// Where things are in the shared memory of a block and in the scratch of a launch.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/decode/classify/kernel.h"

namespace sqz::cuda {

inline constexpr int kClassifyWarps = 8;  // of a block
inline constexpr int kClassifyThreads = 32 * kClassifyWarps;
inline constexpr int kChoiceBytes = 10304;  // of BucketChoice::Shared
// Tiles of weights in a step of a warp, at most: some rows of one column of tiles.
inline constexpr int kStepTiles = 11;

// Scratch: a counter of arrivals a pair, then what blocks exchange, pair after pair.
inline constexpr int kScratchBegin = kTeamPairs * 4;

// Where the arrays begin, in bytes from the end of the struct; all multiples of 16.
struct ClassifyLayout {
  // Rows of tiles of hidden units and of buckets; how many of them a block has, at most.
  int32_t unit_tiles, bucket_tiles, own_unit_tiles, own_bucket_tiles;
  int32_t hidden_columns;  // columns of tiles of the output weights
  int32_t steps;           // of a warp in the ring
  int32_t step_tiles;
  int32_t ring = 0;     // [warps, steps, step_tiles] tiles on their way
  int32_t activations;  // [hidden_columns, 2, 32] fragments of all hidden units
  // [warps, step_tiles, 32] float2: sums of a warp's columns. Of a block with one step a column in
  // the place of the activations.
  int32_t partial;
  // What a pair's blocks send the one that chooses, the same in the scratch of the pair; and what
  // it has of its own. In the place of the ring if there are other blocks.
  int32_t logits;  // [group, 8 bucket_tiles] base 2
  int32_t sums;    // [blocks, warps, kMostGroup] float2: maximum, sum of exponentials
  // [8 bucket_tiles] words and kChoiceBytes of the choice; in the place of the logits.
  int32_t choice;
  int32_t scores;  // [C]
  int32_t spans;   // [C] uint2
  int32_t biases;  // [8 own_bucket_tiles] of the output
  int32_t bytes;

  constexpr ClassifyLayout(int hidden, int buckets, int group, int cluster, int blocks,
                           int ring_steps) {
    unit_tiles = static_cast<int32_t>(weight_rows(hidden));
    bucket_tiles = static_cast<int32_t>(weight_rows(buckets));
    own_unit_tiles = (unit_tiles + cluster - 1) / cluster;
    own_bucket_tiles = (bucket_tiles + blocks - 1) / blocks;
    hidden_columns = static_cast<int32_t>(weight_columns(hidden));
    steps = ring_steps;
    const int rounds = (own_bucket_tiles + kStepTiles - 1) / kStepTiles;
    step_tiles = (own_bucket_tiles + rounds - 1) / rounds;

    const int ring_bytes = kClassifyWarps * steps * step_tiles * kWeightTileBytes;
    const int chosen = std::max(exchange_bytes(group, blocks), bucket_tiles * 32 + kChoiceBytes);
    const int scores_bytes = bucket_tiles * 32;
    activations = std::max(ring_bytes, blocks > 1 ? chosen + scores_bytes : 0);
    int end = activations + hidden_columns * 1024;
    partial = rounds == 1 ? activations : end;
    end = std::max(end, partial + kClassifyWarps * step_tiles * 256);
    logits = choice = blocks > 1 ? 0 : end;
    sums = logits + group * bucket_tiles * 32;
    scores = logits + chosen;
    spans = std::max(end, scores + scores_bytes);
    biases = spans + bucket_tiles * 64;
    bytes = biases + own_bucket_tiles * 32;
  }
  // Of a pair's logits and sums.
  constexpr int32_t exchange_bytes(int group, int blocks) const {
    return group * bucket_tiles * 32 + blocks * kClassifyWarps * kMostGroup * 8;
  }
};

}  // namespace sqz::cuda
