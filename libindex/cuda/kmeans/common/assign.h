// The inputs and outputs of every assign kernel.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sqz::cuda {

// A kernel writes the label of every point, counts it in its cluster's size and notes its rank
// there. Where its own arithmetic cannot decide, it does not count the point but leaves it on the
// list of doubtful ones for the resolve kernels: with the one other candidate, at the front, or, if
// there may be more candidates, at the back.
struct AssignParams {
  const __nv_bfloat16* points;  // [B, N, d]
  __nv_bfloat16* centroids;     // [B, C, d]: rewritten by each update
  const uint32_t* by_label;     // [B, N] or null: points by their present label, see sm90/
  float* inverse_norms;         // [B, N]: 1 / |point|, 0 for a zero point: from launch_norms()
  uint32_t* labels;             // [B, N]
  float* cosines;               // [B, N] or null
  uint32_t* sizes;              // [B, C]: zero before
  uint32_t* ranks;              // [B, N]: place of a point among its cluster's, in any order
  uint2* doubtful;              // [B N]: {b N + i, other candidate}
  uint32_t* doubtful_counts;    // [2]: entries at the front, entries at the back
  int32_t heads, points_per_head, clusters, dim;
};

// Bound of the difference between two tensor-core dot products and the exact ones, as a part of
// |point| |centroid| and per dimension: each of d additions may truncate by 2^-23 of the largest
// partial sum, for both products; a centroid's norm is at most 1 + 2^-7.
inline constexpr float kMarginPerDim = 1.01f / (1 << 22);

inline constexpr int32_t kMaxClusters = 131072;

// The bits of an entry of `order` that number a point; the update uses the other two. Hence the
// limit.
inline constexpr uint32_t kPointBits = 0x3FFFFFFFu;
inline constexpr int32_t kMaxPoints = 1 << 30;

}  // namespace sqz::cuda
