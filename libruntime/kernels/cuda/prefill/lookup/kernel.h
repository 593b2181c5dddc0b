// The parts of prefill_lookup(): two passes over queries and centroids, and the choice.
#pragma once

#include "libruntime/kernels/cuda/prefill/common/tiles.h"
#include "libruntime/kernels/cuda/prefill/lookup/select.h"
#include "libruntime/kernels/cuda/prefill/lookup/sm90/config.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"

namespace sqz::cuda {

inline constexpr int kSm80Parts = 8;  // of a level's clusters, for denominators of blocks of tokens

struct PrefillLookupParams : PrefillLookup {
  bool sm90 = false;
  QueryTiles tiles = {};   // of kLookupRows rows
  QueryTiles chunks = {};  // of kColumnRows queries
  prefill::ItemPlan row_plan = {}, column_plan = {};
  float scale = 0;                  // of the logits, times log2(e)
  float2* row_states = nullptr;     // [row_plan.pieces, T, Hq] {maximum, sum}, to base 2
  float* lse = nullptr;             // [T, Hq] log2 of the denominators
  float* columns = nullptr;         // [column_plan.row_tiles, lists, n] at positions of the list
  uint32_t* ids = nullptr;          // [lists, n] cluster at each position, and its size; neither is
  uint32_t* alive_sizes = nullptr;  // [lists, n] used where all are alive
  uint32_t* taken = nullptr;        // [2] items taken, by pass, beyond the first of each block
  // For pages: [lists, page_pieces, 2, d] sums of the positive and negative parts of a piece of the
  // block's queries.
  float* parts = nullptr;
  int32_t page_pieces = 1;

  __host__ __device__ bool pages() const { return level.greatest != nullptr; }
};

__host__ __device__ inline int32_t alive_clusters(const PrefillLookupParams& params, int32_t list) {
  return params.alive.totals == nullptr ? params.level.clusters
                                        : static_cast<int32_t>(params.alive.totals[list].keys);
}

// `taken` to zero, faults of what is alive to those of what is chosen; runs of alive clusters to
// ids and sizes of each position.
Status launch_prepare(const PrefillLookupParams& params, const Device& device, cudaStream_t stream);

// Both passes. T = __nv_bfloat16 or __half; d = 64, 96, 128 or 256. Compute capability 9.0.
template <class T, int kDim>
Status launch_passes_sm90(const PrefillLookupParams& params, int multiprocessors,
                          cudaStream_t stream);
// The same on every GPU, for all dimensions of for_sm80_dim(); of pages their bounds, up to d =
// 256.
template <int kDim>
Status launch_passes_sm80(const PrefillLookupParams& params, const Device& device,
                          cudaStream_t stream);

// States of rows to log2 of the denominators.
Status launch_denominators(const PrefillLookupParams& params, const Device& device,
                           cudaStream_t stream);

}  // namespace sqz::cuda
