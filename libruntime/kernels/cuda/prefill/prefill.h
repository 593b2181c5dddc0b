// Prefill on the GPU: blocks of query tokens that share a selection, attended over the fixed
// context. Two parts, both on a stream, without allocation or host synchronisation, so that a
// caller may capture them in a CUDA graph:
//
//   prefill_lookup()  queries and one level of centroids -> for every (block, KV head) a list of
//                     runs: clusters of the next level, or slots at the finest level
//   prefill_attend()  queries and such lists of runs of slots -> out and lse
//
// Tensors are bf16 or f16, dense, with d of common/head_dims.h, and 16-byte aligned. Lists are
// numbered list = block * kv_heads + kv_head. All pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "libruntime/attention/lse_rows.h"
#include "libruntime/kernels/cuda/common/run_lists.h"
#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"

namespace sqz::cuda {

// How the copy engine finds the rows of a layer and of a level: see prefill/common/tiles.h.
struct KeyMaps;
struct LevelMaps;
struct ContextLayer;

// Shape of the queries and of what they meet.
struct PrefillShape {
  DType dtype = DType::kBF16;  // of all tensors: BF16 or F16
  int32_t dim = 0;             // d
  int32_t kv_heads = 0;        // Hkv
  int32_t group = 0;           // query heads per KV head, at most 128
  float scale = 0;             // of the logits, usually 1/sqrt(d)
};

// How T tokens are cut into blocks: every block_tokens, or as the table says.
struct QueryBlocks {
  int32_t tokens = 0;           // T
  int32_t count = 0;            // blocks
  int32_t block_tokens = 0;     // of every block (the last may be shorter); the most of one
  const int2* table = nullptr;  // [count] {first token, tokens}; null = every block_tokens
};

inline constexpr uint32_t kExactRow = 0x80000000u;
inline constexpr int32_t kMostCodedDim = 128;  // of rows of 8 bits

struct PrefillAttend {
  PrefillShape shape;
  QueryBlocks blocks;
  AttendLayer keys;
  RunLists selected;  // runs of slots; where `fault` is not 0, out and lse are NaN; null: all slots
  const void* queries = nullptr;  // [T, Hq, d]
  void* out = nullptr;            // [T, Hq, d]; zeros where there are no keys
  LseRows lse;                    // natural log; -infinity where there are no keys
  // [lists, mask_stride]: which tokens of a block attend to each key of its list, exact keys
  // first: bit t for token t. Null: all do. Where they are there, `fault` has bits of tokens, too.
  // Only for blocks of at most 32 tokens and 128 query rows. mask_stride: a multiple of 4, at least
  // kMaskSlack more than E and the keys in a list's runs.
  const uint32_t* masks = nullptr;
  int64_t mask_stride = 0;
  // With masks, for rows of 8 bits: [lists, mask_stride] the number of each key's row, head * M +
  // slot, or kExactRow and the number of an exact row. Else null.
  const uint32_t* rows = nullptr;
  // In device memory, [T]: each token's own layer, the same for those of a block, in place of
  // `keys`, of which `coded` alone says whether rows are of codes. With lists, whose totals say how
  // many exact keys there are; without masks they are of all slots.
  const ContextLayer* own = nullptr;
  // The tensor maps of `keys`, which are made if they are not there yet. Null: the call makes its
  // own.
  KeyMaps* maps = nullptr;
};

inline constexpr int64_t kMaskSlack = 256;

// Bytes of workspace of prefill_attend() for calls of at most as many blocks, of block_tokens
// tokens each, and T tokens in all. 256-byte alignment is wanted.
int64_t prefill_attend_workspace(const PrefillShape& shape, const QueryBlocks& blocks,
                                 int multiprocessors);

// kUnsupported for a shape that no kernel was compiled for. Results do not depend on the timing of
// the run, only on the number of multiprocessors.
Status prefill_attend(const PrefillAttend& call, void* workspace, int64_t workspace_bytes,
                      int multiprocessors, cudaStream_t stream);

// One level of centroids, and what becomes of their scores (libruntime/select/score.h and rule.h
// define both). An empty cluster is never chosen.
struct PrefillLevel : LookupLevel {
  bool finest = true;
  LevelMaps* maps = nullptr;  // of the centroids, as PrefillAttend's
  // By scope: [0] for blocks of one token, [1] for blocks of several. A threshold on log S where
  // `wanted` is null; else [Hkv] how many keys to keep (the rule `budget`), or how many pages.
  float log_threshold[2] = {0, 0};
  const uint32_t* wanted[2] = {nullptr, nullptr};
};

struct PrefillLookup {
  PrefillShape shape;
  QueryBlocks blocks;
  PrefillLevel level;
  RunLists alive;                 // runs of clusters to score; null: all
  const void* queries = nullptr;  // [T, Hq, d]
  DType q_dtype = DType::kBF16;   // of the queries
  // Out, with a capacity of at least (n + 1) / 2. fault: 1 where a logit is NaN or +infinity, or
  // alive's is 1; then nothing is chosen and nothing counted.
  RunLists chosen;
  // {selections, keys in the runs of the finest level, centroids read} are added to; may be null.
  unsigned long long* counters = nullptr;
};

// `sm90`: with the kernels for Hopper, which take queries of the index's type alone, and no pages.
// The others use mma.sync and serve everything on every GPU.
int64_t prefill_lookup_workspace(const PrefillShape& shape, const QueryBlocks& blocks,
                                 int32_t clusters, bool sm90);

Status prefill_lookup(const PrefillLookup& call, void* workspace, int64_t workspace_bytes,
                      const Device& device, bool sm90, cudaStream_t stream);

}  // namespace sqz::cuda
