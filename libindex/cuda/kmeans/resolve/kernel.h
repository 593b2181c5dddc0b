// Decides the points that an assign kernel left doubtful, by dot products in float64: products of
// bf16 numbers are exact there and so, but for extreme ranges, are their sums.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/status.h"
#include "libindex/cuda/kmeans/common/assign.h"

namespace sqz::cuda {

Status launch_resolve(const AssignParams& params, int multiprocessors, cudaStream_t stream);

}  // namespace sqz::cuda
