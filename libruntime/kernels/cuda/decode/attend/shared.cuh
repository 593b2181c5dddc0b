// The constants of the attention kernel, its shared memory and what it leaves in the workspace.
#pragma once

#include "libruntime/kernels/cuda/common/rows8.cuh"
#include "libruntime/kernels/cuda/decode/attend/kernel.h"

namespace sqz::cuda {

inline constexpr int kAttendThreads = 256;
inline constexpr int kAttendWarps = kAttendThreads / 32;
inline constexpr int kListKeys = 4096;  // of a segment, located at once
// The same of rows of 8 bits, and clusters of a warp's that are worked on at once.
constexpr int coded_keys(int rows) {
  return rows > 8 ? 768 : 1536;
}
inline constexpr int kTableClusters = 32;
inline constexpr int kTileKeys = 16;        // of a warp, at once
inline constexpr int64_t kLeastKeys = 128;  // of a block: less is not worth a merge
inline constexpr uint32_t kExactKey = 0x80000000u;
inline constexpr float kLowestMaximum = -3.0e38f;  // differences stay finite

// In the workspace, after one counter a pair: what a block leaves of a pair that it shares with
// others. Its first segment may be the end of a pair, its last the beginning of one.
template <int kDim, int kRows>
struct AttendPartial {
  float values[kRows][kDim];
  float2 total[kRows];  // maximum, and sum relative to it
};

// A row of 8 bits. Its cluster is numbered by the warp that attends to it, with a place in its
// table.
struct alignas(16) CodedKey {
  uint32_t slot, cluster;
  float key_scale, value_scale;
};

// A block reads this of a segment.
template <int kDim, int kRows>
struct AttendInput {
  QueryRows<kDim, kRows> queries;
  union {
    alignas(16) uint32_t list[kListKeys];  // where the keys of a segment are
    CodedKey coded[2][coded_keys(kRows)];  // the same, and of the next list
  };
  QueryCodes<kDim, kRows> query_codes;  // against rows of 8 bits
  // Tables of the warps: a cluster's number, the logits of its mean key, the sums of its weights.
  uint32_t clusters[kAttendWarps][kTableClusters];
  float logits[kAttendWarps][kTableClusters][kRows];
  float weights[kAttendWarps][kTableClusters][kRows];
};

template <int kDim, int kRows>
struct AttendShared {
  int64_t before[kMostPairs + 1];    // keys of the pairs before each, and their starts
  float2 sums[kRows][kAttendWarps];  // of the warps: maximum, and sum relative to it
  float2 total[kRows];
  uint32_t last;
  AttendLayer layer;  // of the segment's pair, if the requests have layers of their own
  union {
    AttendInput<kDim, kRows> in;
    alignas(16) float values[kAttendWarps][8][kDim];  // of the warps, at its end: 8 rows at once
  };
};

}  // namespace sqz::cuda
