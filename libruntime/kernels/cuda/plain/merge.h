// The merge of what plain attention left in parts.
#pragma once

#include "libruntime/kernels/cuda/plain/attend.cuh"

namespace sqz::cuda {

// rows: of a row tile.
Status plain_merge(const PlainAttend& call, const PlainCut& cut, int rows, cudaStream_t stream);

}  // namespace sqz::cuda
