// Assign kernel for compute capability 10.0: tcgen05, copy engine, one persistent block an SM.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/status.h"
#include "libindex/cuda/kmeans/common/assign.h"

namespace sqz::cuda::sm100 {

// d = 64, 96, 128 or 256. params.order is not looked at.
template <int kDim>
Status launch_assign(const AssignParams& params, int multiprocessors, cudaStream_t stream);

}  // namespace sqz::cuda::sm100
