// Causal attention of a few query rows over the keys of one KV head, in float32: the inner loop of
// a dense pass (training/cpu_cache.cc). Blocks of keys stay in the caches while all rows pass over
// them, the softmax is online, and blocks that no row may see are skipped, so no score matrix
// larger than [rows, kCausalBlock] ever exists.
#pragma once

#include <cstdint>

#include "libruntime/kernels/cpu/kernels.h"

namespace sqz {

// Keys are stored in panels of kCausalPanel tokens, transposed: panel p holds [d, kCausalPanel],
// lane i of it is token p * kCausalPanel + i.
inline constexpr int64_t kCausalPanel = 32;
inline constexpr int64_t kCausalBlock = 256;  // keys of one pass; a multiple of kCausalPanel
inline constexpr int64_t kCausalRows = 96;    // query rows of one task

struct CausalTask {
  int64_t rows = 0;                // <= kCausalRows
  int64_t dim = 0;                 // d
  const float* q = nullptr;        // [rows, d]
  float scale = 0;                 // logits are scale * q.k
  const int64_t* begin = nullptr;  // [rows] first key that the row sees
  const int64_t* end = nullptr;    // [rows] one past the last; begin < end
  const float* panels = nullptr;   // [ceil(keys / kCausalPanel), d, kCausalPanel]; unused lanes are
                                   // finite
  const float* values = nullptr;   // [keys, padded_dim(d)], zero beyond d
  float* workspace = nullptr;      // causal_workspace(d) floats
  float* out = nullptr;            // [rows, d]
  float* lse = nullptr;            // [rows], natural log
};

constexpr int64_t causal_workspace(int64_t dim) {
  constexpr int64_t kRows = kCausalRows + 12;  // rows are padded to the register tile
  return kRows * (dim + kCausalBlock + padded_dim(dim) + 2);
}

}  // namespace sqz
