// Lookup for a batch: many requests of one token each select from one index, and what any of them
// selected is listed once for all, with a word for every key that says which of them did. Scores
// and rules are those of decode_lookup; every centroid is read once for up to 32 requests.
//
// Requests are cut into chunks of `chunk` of them. A list is of a chunk and a KV head: list =
// chunk's number * Hkv + head.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"

namespace sqz::cuda {

inline constexpr int kBatchRows = 128;  // query heads of a list, at most,
inline constexpr int kBatchGroup = 64;  // and of a warp
inline constexpr int kBatchParts = 64;  // of a level's clusters, at most: a block each
inline constexpr int kBatchTile = 16;   // clusters of a product; parts are of whole tiles

// log2 of the rows of a request: its heads, and zeros up to a power of two.
__host__ __device__ constexpr int batch_log_rows(int group) {
  return group > 8 ? 4 : group > 4 ? 3 : group > 2 ? 2 : group - 1;
}
// Requests of a list, at most: bits of a word.
constexpr int batch_chunk(int group) {
  const int requests = kBatchRows >> batch_log_rows(group);
  return requests < 32 ? requests : 32;
}

struct BatchLookup {
  // Without `lists` and `alive`.
  LookupParams lookup;
  int32_t chunk = 0;  // requests of a list, at most batch_chunk()
  // Out: runs of every list and [lists, mask_stride] words of its keys, the exact ones first.
  RunLists runs;
  uint32_t* masks = nullptr;
  int64_t mask_stride = 0;
  int32_t exact = 0;          // exact keys that are attended,
  int32_t exact_skipped = 0;  // and those in front of them that are not
  // For rows of 8 bits: [lists, mask_stride] the number of each key's row, as in PrefillAttend.
  // Null: not wanted.
  uint32_t* rows = nullptr;
  // The clusters of rows of 8 bits, whose means are counted; else 0.
  int32_t means = 0;

  // Workspace. [4, lists, width]: the requests that a cluster is alive for, by level % 2, and those
  // that chose it, by the group of their rows.
  uint32_t* words = nullptr;
  float2* sums = nullptr;  // [lists, kBatchParts, kBatchRows] maximum, sum of exponentials
  // [lists, kBatchParts + 1] runs << 32 | keys of the finest level, and a bit when they are there;
  // then how many blocks have begun.
  unsigned long long* counts = nullptr;
  uint32_t* faults = nullptr;  // [pairs] 1: met NaN or infinity
  // For the rule kBudget, by pair = request * Hkv + head:
  float* scores = nullptr;     // [pairs, width]
  uint32_t* chosen = nullptr;  // [pairs, width / 32 + 1] bits

  __host__ __device__ int chunks() const { return (lookup.requests + chunk - 1) / chunk; }
  __host__ __device__ int lists() const { return chunks() * lookup.kv_heads; }
  // Parts of a level, for each list: about as many blocks as the GPU holds at once.
  int parts(int level) const {
    constexpr int kBlocks = 2;  // a multiprocessor
    const int tiles = (lookup.level[level].clusters + kBatchTile - 1) / kBatchTile;
    const int most = kBlocks * lookup.device.multiprocessors / lists();
    return std::clamp(std::min(most, (tiles + 7) / 8), 1, kBatchParts);
  }
};

// kUnsupported for a dim that there is no kernel for.
Status batch_lookup(const BatchLookup& call, cudaStream_t stream);

// The rule kBudget, after launch_select(): from what pairs chose to words, and on.
Status launch_batch_chosen(const BatchLookup& call, int level, cudaStream_t stream);

}  // namespace sqz::cuda
