// Causal attention of a few query rows over the keys of one KV head on the CPU, in float32: the
// inner loop of a dense pass. Blocks of keys stay in the caches while all rows pass over them, the
// softmax is online, and blocks that no row may see are skipped, so no score matrix larger than
// [rows, kKeyBlock] ever exists.
//
// The same source (cpu_kernel.inc) is compiled for several instruction sets; cpu_kernel() picks.
#pragma once

#include <cstdint>

namespace sqz::training {

// Keys are stored in panels of kPanel tokens, transposed: panel p holds [d, kPanel], lane i of it
// is token p * kPanel + i.
inline constexpr int64_t kPanel = 32;
inline constexpr int64_t kKeyBlock = 256;  // keys of one pass; a multiple of kPanel
inline constexpr int64_t kMaxRows = 96;    // query rows of one task

// Values are stored in rows of this many floats, zero beyond d.
inline int64_t padded_dim(int64_t dim) {
  return (dim + kPanel - 1) / kPanel * kPanel;
}

struct RowsTask {
  int64_t rows = 0;                // <= kMaxRows
  int64_t dim = 0;                 // d
  const float* q = nullptr;        // [rows, d]
  float scale = 0;                 // logits are scale * q.k
  const int64_t* begin = nullptr;  // [rows] first key that the row sees
  const int64_t* end = nullptr;    // [rows] one past the last; begin < end
  const float* panels = nullptr;   // [ceil(keys / kPanel), d, kPanel]; unused lanes are finite
  const float* values = nullptr;   // [keys, padded_dim(d)]
  float* workspace = nullptr;      // workspace_floats(d), 64-byte aligned
  float* out = nullptr;            // [rows, d]
  float* lse = nullptr;            // [rows], natural log
};

int64_t workspace_floats(int64_t dim);

struct CpuKernel {
  const char* name;
  void (*attend)(const RowsTask& task);
};

// The fastest that this processor runs. `widest` caps the vector width in bits (tests).
const CpuKernel& cpu_kernel(int widest = 512);

}  // namespace sqz::training
