// Everything of the loop but the assignment: norms, first centroids, grouping points by cluster,
// new centroids, refills. All of it is bound by memory traffic and runs on any GPU from 8.0.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "formats/base/status.h"
#include "libindex/cuda/kmeans/common/assign.h"

namespace sqz::cuda {

// The update has this beside what the assignment reads and writes.
struct UpdateParams : AssignParams {
  int32_t first_head;  // number of head 0 among all heads of the run: seeds depend on it
  uint64_t seed;
  const uint64_t* seeds;    // [B] or null
  const uint32_t* weights;  // [B, N] or null
  uint32_t* order;          // [B, N]: see kCame
  uint32_t* offsets;        // [B, C + 1]
  uint2* seats;             // [B, C]: scratch of the refill
  uint2* donors;            // [B, C]: of an empty cluster: the cluster to split, which split
  uint32_t* large;          // [B N / 32]: clusters left to whole blocks
  uint32_t* large_counts;   // [2]: zero before the first launch_centroids and launch_sort
  uint32_t* empty_heads;    // [1]: heads with an empty cluster; zero before launch_group

  // Sums that are kept from update to update, so that the next one reads only the points that have
  // changed cluster. Null: nothing is kept, and every update reads every point.
  int32_t* sums;                     // [B, C, d] of the last update, in fixed point
  uint32_t* places;                  // [B, N]: each point's place in the last update's order
  uint32_t* previous_order;          // [B, N]: of the last update; null before the first one
  const uint32_t* previous_offsets;  // [B, C + 1]

  bool after_move;  // then there is nothing to do if no head had one
  uint32_t* fault;  // [1]
  int32_t multiprocessors;
};

// Beside a point's number in `order`: it was not in this cluster at the last update, it is not in
// it at the next.
inline constexpr uint32_t kCame = 0x80000000u, kLeft = 0x40000000u;
static_assert(((kCame | kLeft) & kPointBits) == 0);

#ifdef __CUDACC__
__device__ __forceinline__ bool nothing_moved(const UpdateParams& params) {
  return params.after_move && *params.empty_heads == 0;
}
#endif

// inverse_norms, and fault bits.
Status launch_norms(const UpdateParams& params, cudaStream_t stream);
// First centroids: one point from each of C equal runs of points, chosen by the seed.
Status launch_seed(const UpdateParams& params, cudaStream_t stream);
// labels -> sizes (zero before), ranks: what an assign kernel does by itself.
Status launch_count(const UpdateParams& params, cudaStream_t stream);
// labels, sizes, ranks -> offsets, order (not sorted within a cluster), donors of empty clusters.
// If sums are kept: places, and kCame in `order` and kLeft in `previous_order`.
Status launch_group(const UpdateParams& params, cudaStream_t stream);
// offsets, order, donors -> centroids. The order within a cluster does not matter.
Status launch_centroids(const UpdateParams& params, cudaStream_t stream);
// Sorts `order` within each cluster.
Status launch_sort(const UpdateParams& params, cudaStream_t stream);
// Sorted order, donors -> labels in which no cluster is empty; they must be counted and
// grouped again.
Status launch_move(const UpdateParams& params, cudaStream_t stream);

}  // namespace sqz::cuda
