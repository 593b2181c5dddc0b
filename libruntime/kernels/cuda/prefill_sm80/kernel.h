// Blocks of query tokens on GPUs before Hopper, and for calls that the Hopper kernels do not take:
// other types of queries, caches beside uploaded keys. A plain pair of lookup and attention on
// mma.sync, for every shape; what they compute is what decode_lookup() and decode_attend() do, with
// one selection a block. Pairs are numbered pair = block * Hkv + head.
#pragma once

#include "libruntime/kernels/cuda/decode_attend/kernel.h"
#include "libruntime/kernels/cuda/decode_lookup/kernel.h"
#include "libruntime/kernels/cuda/prefill.h"

namespace sqz::cuda {

inline constexpr int kSm80Parts = 8;  // of a level's clusters, for denominators
// Attention cuts keys into parts, of at least so many keys each and for at most so many blocks of
// threads a multiprocessor, of so many rows or fewer.
inline constexpr int kSm80LeastKeys = 256;
inline constexpr int kSm80Waves = 4;
inline constexpr int kSm80Rows = 128;

// Clusters that were scored but not chosen, which attention takes as one key each: the residual
// `estimate`. A level is one in use, from the coarsest on.
struct Sm80Estimates {
  uint32_t* list = nullptr;    // [pairs, capacity] level << kLevelShift | cluster; null: none
  uint32_t* counts = nullptr;  // [pairs]
  int64_t capacity = 0;
  struct Level {
    const void* centroids = nullptr;    // [Hkv, n, d]
    const void* value_means = nullptr;  // [Hkv, n, d]
    const float* log_sizes = nullptr;   // [Hkv, n] natural, added to the logit
    int64_t clusters = 0;               // n
  } level[kMostLevels];
};
inline constexpr int kLevelShift = 28;

// Queries, shape, levels, width, alive, lists and counters are in LookupParams, whose lists are of
// pairs; `requests` is not looked at.
struct Sm80Lookup {
  LookupParams token, block;  // the same but for thresholds and wanted keys: blocks of one token,
                              // and of several
  QueryBlocks blocks;         // tokens as in q
  PrefillGroup policy = PrefillGroup::kMean;
  Sm80Estimates estimates;  // out, unless the list is null

  // Workspace.
  float2* sums = nullptr;  // [T, Hq, kSm80Parts] maximum, sum of exponentials; not of pages
  float* lse = nullptr;    // [T, Hq] log2 of the denominators; not of pages
  // Pages: [pairs, rows, pieces, 2, d] sums of the positive and negative parts of the block's
  // queries, in so many pieces; one row or, of the policy `max`, one a head. Of the policy `any`
  // none.
  float* parts = nullptr;
  int32_t pieces = 1;
  float* scores = nullptr;     // [pairs, width] log2 of the combined S; of pages their bounds
  uint32_t* chosen = nullptr;  // [pairs, width] 1: by sm80_choose()
  uint2* state = nullptr;      // [pairs] {clusters alive at the next level, centroids read}
  uint32_t* faults = nullptr;  // [pairs] 1: a logit was NaN or infinite
};

// kUnsupported for a dim or group that there is no kernel for.
Status sm80_lookup(const Sm80Lookup& call, cudaStream_t stream);

// q, out, lse, shape, keys, cache and lists (of pairs, or of heads) are in AttendParams; requests,
// counters and its workspace are not looked at.
struct Sm80Attend {
  AttendParams params;
  QueryBlocks blocks;
  Sm80Estimates estimates;
  float* partials = nullptr;  // of sm80_attend_workspace() bytes
};

// How rows and keys are cut.
struct Sm80Cut {
  int row_tiles, parts;
};

size_t sm80_attend_workspace(int multiprocessors, int dim);

// Results depend on the number of multiprocessors, not on timing.
Status sm80_attend(const Sm80Attend& call, cudaStream_t stream);

// ---- The steps that do not depend on the head dimension.

// call.lse from call.sums, and call.faults.
Status sm80_lse(const Sm80Lookup& call, cudaStream_t stream);

// From the scores of a level to what is alive at the next one, or to runs.
Status sm80_choose(const Sm80Lookup& call, int level, cudaStream_t stream);

// What attention left in parts, into the result. rows: of a row tile.
Status sm80_merge(const Sm80Attend& call, const Sm80Cut& cut, int rows, cudaStream_t stream);

}  // namespace sqz::cuda
