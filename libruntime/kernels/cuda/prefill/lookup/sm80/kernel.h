// Lookup for blocks of query tokens on GPUs before Hopper, and for calls that the Hopper kernels do
// not take: queries of another type, and pages. It uses mma.sync, serves every shape and computes
// the same as decode_lookup(), with one selection a block. Pairs are numbered pair = block * Hkv +
// head.
#pragma once

#include "libruntime/kernels/cuda/decode/lookup/kernel.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"

namespace sqz::cuda {

inline constexpr int kSm80Parts = 8;  // of a level's clusters, for denominators

// Queries, shape, levels, width, alive, lists and counters are in LookupParams, whose lists are of
// pairs; `requests` is not looked at.
struct Sm80Lookup {
  LookupParams token, block;  // the same but for thresholds and wanted keys: blocks of one token,
                              // and of several
  QueryBlocks blocks;         // tokens as in q

  // Workspace.
  float2* sums = nullptr;  // [T, Hq, kSm80Parts] maximum, sum of exponentials; not of pages
  float* lse = nullptr;    // [T, Hq] log2 of the denominators; not of pages
  // Pages: [pairs, pieces, 2, d] sums of the positive and negative parts of the block's queries.
  float* parts = nullptr;
  int32_t pieces = 1;
  float* scores = nullptr;     // [pairs, width] log2 of the combined S; of pages their bounds
  uint32_t* chosen = nullptr;  // [pairs, width] 1: by sm80_choose()
  uint2* state = nullptr;      // [pairs] {clusters alive at the next level, centroids read}
  uint32_t* faults = nullptr;  // [pairs] 1: a logit was NaN or infinite
};

// kUnsupported for a dim or group that there is no kernel for.
Status sm80_lookup(const Sm80Lookup& call, cudaStream_t stream);

// ---- The steps that do not depend on the head dimension.

// call.lse from call.sums, and call.faults.
Status sm80_lse(const Sm80Lookup& call, cudaStream_t stream);

// From the scores of a level to what is alive at the next one, or to runs.
Status sm80_choose(const Sm80Lookup& call, int level, cudaStream_t stream);

}  // namespace sqz::cuda
