// Constants and shared memory of the kernel for rows of codes.
#pragma once

#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode_codes/kernel.h"
#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"

namespace sqz::cuda {

inline constexpr int kCodedThreads = 512;
inline constexpr int kCodedWarps = kCodedThreads / 32;
static_assert(kCodedWarps == 16 && kMostTeam == 16);
inline constexpr int kFewItems = 32;  // that are compared with each other

// Steps of 32 dimensions that products with key codes take: lanes load whole words.
template <int kDim>
inline constexpr int kCodeSteps = kDim == 256 ? 8 : 4;

// Queries as two 8-bit numbers each, first + second / 254 times a step of the row, in the order of
// mma fragments.
template <int kSteps>
struct QueryParts {
  uint4 words[kSteps * 32];
  float step[kMostGroup];
};

template <int kDim>
struct CodedShared {
  static constexpr int kRowsAtOnce = 2;

  QueryRows<kDim> queries;                  // in 16 bits, times the scale
  QueryParts<kDim / 32> row_parts;          // against rows of 8 bits
  QueryParts<kCodeSteps<kDim>> code_parts;  // times the rotation, against key codes
  float query[kMostGroup][kDim];
  TeamShared<kCodedThreads> team;
  union {
    struct {
      CodedItem few[kFewItems];
      uint32_t sizes[kCodeBins + 1];
      uint32_t found[2], count[2];
    } search;
    float rows[kRowsAtOnce][kCodedWarps * (256 / kDim)][kDim];  // sums of lanes, of query rows
  };
  float maximum[kCodedWarps][kMostGroup], sum[kCodedWarps][kMostGroup];
  float lse[kMostGroup], top[kMostGroup], total[kMostGroup];
  uint32_t fault;
  uint32_t vectors, codes;  // that this block has read
  uint64_t memory;          // where the team's keys are, if not here
  float levels4[16];        // what codes of 4 bits stand for
};
static_assert(sizeof(CodedShared<256>) <= kLeastBlockShared);

}  // namespace sqz::cuda
