// Plain assign kernel: mma.sync and cp.async, one block for 128 points.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/status.h"
#include "libindex/cuda/kmeans/common/assign.h"

namespace sqz::cuda::sm80 {

// d = 32, 64, 96, 128 or 256.
template <int kDim>
Status launch_assign(const AssignParams& params, cudaStream_t stream);

}  // namespace sqz::cuda::sm80
