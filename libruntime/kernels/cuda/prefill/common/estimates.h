// Clusters that count with their mean: found by a lookup, attended to by attention.
#pragma once

#include "libruntime/kernels/cuda/decode/lookup/kernel.h"

namespace sqz::cuda {

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

}  // namespace sqz::cuda
