// Shared memory of a block: a struct, and the arrays of ClassifyLayout behind it. These begin at a
// multiple of 128 bytes: 16 further the ring's copies take 0.8 us longer.
#pragma once

#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode/classify/layout.h"
#include "libruntime/kernels/cuda/decode/lookup/parts.cuh"

namespace sqz::cuda {

template <int kDim>
struct alignas(128) ClassifyShared {
  QueryRows<kDim> queries;
  TeamShared<kClassifyThreads> team;
  float cosines[kDim / 2], sines[kDim / 2];
  float lse[kMostGroup];
  uint32_t arrived;  // blocks of the pair, before this one
};

}  // namespace sqz::cuda
