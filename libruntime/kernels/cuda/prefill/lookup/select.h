// From the scores of clusters, pages or buckets to what is read: the rule, and the runs of what it
// chose. One block of threads serves a list.
#pragma once

#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/decode/context_layer.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"

namespace sqz::cuda {

// `alive` are the clusters that have a score; of `shape` only heads matter.
struct SelectRuns : PrefillLookup {
  // They are read where `alive` leaves clusters out; else a cluster's position is its number.
  const uint32_t* ids = nullptr;          // [lists, n] cluster at each position,
  const uint32_t* alive_sizes = nullptr;  // [lists, n] and its size
  // [lists, stride] log2 S of each position, -infinity if it is empty; or [tiles, lists, stride]
  // sums of S over the queries of a tile of `tile_tokens` tokens.
  float* scores = nullptr;
  int64_t stride = 0;
  int32_t tile_tokens = 0;
  uint32_t vectors = 0;  // that were read for a cluster
  // In place of `chosen`: [lists, ceil(stride / 32)] bits of the clusters; [lists] not 0 = a fault.
  uint32_t* bits = nullptr;
  const uint32_t* faults = nullptr;
  // In device memory, by block of one request: its own layer, of which level `depth` is served in
  // place of `level`, which has the most clusters. Only with `bits`.
  const ContextLayer* own = nullptr;
  int32_t depth = 0;
};

// prefill_lookup() without the choice: `out` gets the scores as launch_select() takes them. They
// stay in the workspace until it is used again.
Status prefill_scores(const PrefillLookup& call, void* workspace, int64_t workspace_bytes,
                      const Device& device, bool sm90, cudaStream_t stream, SelectRuns& out);

// kUnsupported for more clusters than a block's shared memory has bits.
Status launch_select(const SelectRuns& call, const Device& device, cudaStream_t stream);

}  // namespace sqz::cuda
