// Lookup for a batch: many requests of one token each select from one index, and what any of them
// selected is listed once for all, with a word for every key that says which of them did. Scores
// and rules are those of decode_lookup; every centroid is read once for up to 32 requests.
//
// Requests are cut into chunks of `chunk` of them. A list is of a chunk and a KV head: list =
// chunk's number * Hkv + head.
#pragma once

#include "libruntime/kernels/cuda/prefill.h"
#include "libruntime/kernels/cuda/prefill_sm80/kernel.h"

namespace sqz::cuda {

inline constexpr int kBatchRows = 128;    // query rows of a list, at most
inline constexpr int kBatchParts = 64;    // of a level's clusters, at most: each leaves sums
inline constexpr int kBatchTile = 64;     // clusters of a tile of logits
inline constexpr int kBatchChoose = 256;  // clusters of a block that chooses

// How much calls with about as many requests selected from a layer. Where that was most of the
// keys, the next calls read everything, which is faster than to choose; every so often one chooses
// again.
inline constexpr uint32_t kBatchAsks = 32;  // calls of which one chooses in any case
struct BatchHistory {
  uint32_t whole;           // 1: the present call reads everything
  uint32_t next;            // 1: the next one does
  uint32_t calls;           // since one chose
  uint32_t lists;           // of a call that chooses, whose keys are counted
  unsigned long long keys;  // of these
};

struct BatchLookup {
  LookupParams lookup;  // q, shape, rule, levels, wanted, counters; `lists` only for kBudget
  int32_t chunk = 0;    // requests of a list, at most 32, of at most kBatchRows query rows
  // Out: runs of every list and [lists, mask_stride] words of its keys, the exact ones first.
  RunLists runs;
  uint32_t* masks = nullptr;
  int64_t mask_stride = 0;
  int32_t exact = 0;  // E

  // Null: every call chooses. `most`: keys of all lists; with more the next calls read everything.
  BatchHistory* history = nullptr;
  uint64_t most = 0;

  // Workspace.
  int64_t stride = 0;       // of logits: the width in whole tiles
  float* logits = nullptr;  // [lists, chunk * group, stride] base 2
  float2* sums = nullptr;   // [lists, chunk * group, kBatchParts] maximum, sum of exponentials
  // [2, lists], by level % 2: bits of the requests that met NaN or infinity at the level or before.
  uint32_t* faults = nullptr;
  uint32_t* words = nullptr;  // [2, lists, width] requests a cluster is alive for, or chosen by
  // [lists, choose_tiles] runs << 32 | keys of the finest level, and a bit when they are there.
  unsigned long long* counts = nullptr;
  // Of the rule kBudget, by pair = request * Hkv + head:
  float* scores = nullptr;          // [pairs, width]
  uint32_t* chosen = nullptr;       // [pairs, width]
  uint2* state = nullptr;           // [pairs]
  uint32_t* pair_faults = nullptr;  // [pairs]

  __host__ __device__ int chunks() const { return (lookup.requests + chunk - 1) / chunk; }
  __host__ __device__ int lists() const { return chunks() * lookup.kv_heads; }
  // Blocks that choose from a level, for each list.
  __host__ __device__ int choose_tiles(int level) const {
    const int clusters = lookup.level[level].clusters;
    return clusters == 0 ? 1 : (clusters + kBatchChoose - 1) / kBatchChoose;
  }
};

// kUnsupported for a dim that there is no kernel for.
Status batch_lookup(const BatchLookup& call, cudaStream_t stream);

// ---- The steps that do not depend on the head dimension.

// From logits and sums of a level, of so many parts: by the rule kThreshold to words of what is
// chosen, and from these to those of the children, or to runs and masks; by the rule kBudget to
// scores.
Status launch_batch_choose(const BatchLookup& call, int level, int parts, cudaStream_t stream);

// The rule kBudget: from scores to words, and on.
Status launch_batch_budget(const BatchLookup& call, int level, cudaStream_t stream);

}  // namespace sqz::cuda
