// The constants of the attention kernel, its shared memory and what it leaves in the workspace.
#pragma once

#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode_attend/kernel.h"

namespace sqz::cuda {

inline constexpr int kAttendThreads = 256;
inline constexpr int kAttendWarps = kAttendThreads / 32;
inline constexpr int kListKeys = 4096;      // of a segment, located at once
inline constexpr int kTileKeys = 16;        // of a warp, at once
inline constexpr int64_t kLeastKeys = 128;  // of a block: less is not worth a merge
inline constexpr uint32_t kExactKey = 0x80000000u;
inline constexpr int kEarlyBytes = 8192;           // of queries that are fetched early, at most
inline constexpr float kLowestMaximum = -3.0e38f;  // differences stay finite

// In the workspace, after one counter a pair: what a block leaves of a pair that it shares with
// others. Its first segment may be the end of a pair, its last the beginning of one.
template <int kDim>
struct AttendPartial {
  float values[kAttendRows][kDim];
  float maximum[kAttendRows], sum[kAttendRows];
};

template <int kDim>
struct AttendShared {
  QueryRows<kDim> queries;
  uint4 early[kEarlyBytes / 16];   // queries as they came
  int64_t before[kMostPairs + 1];  // keys of the pairs before each
  float maximum[kAttendWarps][kAttendRows], sum[kAttendWarps][kAttendRows];
  float total_maximum[kAttendRows], total_sum[kAttendRows];
  float weights[kAttendRows][kMostBlocks];  // of the parts of a pair
  uint32_t last;
  int64_t whole;
  union {
    alignas(16) uint32_t list[kListKeys];                       // where the keys of a segment are
    alignas(16) float values[kAttendWarps][kAttendRows][kDim];  // of the warps, at its end
  };
};

}  // namespace sqz::cuda
