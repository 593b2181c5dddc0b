// Lookup for a batch: many requests of one token each select, and what any of those of one index
// selected is listed once for all, with a word for every key that says which of them did. Scores
// and rules are those of decode_lookup; every centroid is read once for up to 32 requests.
//
// Requests are cut into blocks, each of requests of one index. A list is of a block and a KV head:
// list = block * Hkv + head.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/decode/context_layer.h"
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

// Blocks of threads for each of so many lists: together so many on a multiprocessor, which holds
// them at once.
__host__ __device__ constexpr int batch_blocks(const Device& device, int lists, int on_each) {
  const int blocks = on_each * device.multiprocessors / lists;
  return blocks < 1 ? 1 : blocks;
}
inline constexpr int kBatchOnEach = 2, kChosenOnEach = 4;  // where products are made, and not
// Parts of a level's clusters, if there are so many blocks of threads for a list.
__host__ __device__ constexpr int batch_parts(int clusters, int blocks) {
  const int tiles = (clusters + kBatchTile - 1) / kBatchTile, least = (tiles + 7) / 8;
  const int parts = blocks < least ? blocks : least;
  return parts < 1 ? 1 : parts < kBatchParts ? parts : kBatchParts;
}

struct BatchLookup {
  // Without `lists` and `alive`; `exact` is set. With layers of the requests' own the number of
  // levels is the most of one, and 0 if nothing is looked up.
  LookupParams lookup;
  AttendLayer keys;                // of the layer, of which exact keys and means are looked at
  QueryBlocks blocks;              // of at most batch_chunk() requests
  const int32_t* count = nullptr;  // in device memory: blocks that there are, of the table; or null
  // Out: runs of every list and [lists, mask_stride] words of its keys, the exact ones first. Null:
  // not wanted, where nothing is looked up.
  RunLists runs;
  uint32_t* masks = nullptr;
  int64_t mask_stride = 0;
  // For rows of 8 bits: [lists, mask_stride] the number of each key's row, as in PrefillAttend.
  // Null: not wanted.
  uint32_t* rows = nullptr;

  // Workspace. [4, lists, width]: the requests that a cluster is alive for, by level % 2, and those
  // that chose it, by the group of their rows.
  uint32_t* words = nullptr;
  float2* sums = nullptr;  // [lists, kBatchParts, kBatchRows] maximum, sum of exponentials
  // [lists, kBatchParts + 1] runs << 32 | keys of the finest level, and a bit when they are there;
  // then how many blocks have begun.
  unsigned long long* counts = nullptr;
  uint32_t* faults = nullptr;  // [pairs] 1: met NaN or infinity
  // For the rule kBudget, by pair = request * Hkv + head:
  float* scores = nullptr;     // [pairs, score_stride()]
  uint32_t* chosen = nullptr;  // [pairs, score_stride() / 32] bits

  __host__ __device__ int64_t score_stride() const { return (lookup.width + 31) / 32 * 32; }

  __host__ __device__ int lists() const { return blocks.count * lookup.kv_heads; }
  // Blocks of threads of a launch.
  unsigned launched(int level, int on_each = kBatchOnEach) const {
    const int each = batch_blocks(lookup.device, lists(), on_each);
    if (lookup.own != nullptr) {  // the fewer the lists that there are, the more for one
      return static_cast<unsigned>(std::max(on_each * lookup.device.multiprocessors, lists()));
    }
    return static_cast<unsigned>(lists() * batch_parts(lookup.level[level].clusters, each));
  }
};

// kUnsupported for a dim that there is no kernel for.
Status batch_lookup(const BatchLookup& call, cudaStream_t stream);

// The rule kBudget, after launch_select(): from what pairs chose to words, and on. And, with layers
// of the requests' own, lists of those that are read whole.
Status launch_batch_chosen(const BatchLookup& call, int level, cudaStream_t stream);

}  // namespace sqz::cuda
