// What a plain lookup selected, as the attention of the prefill kernels reads it.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/status.h"
#include "libruntime/kernels/cuda/common/run_lists.h"
#include "libruntime/kernels/cuda/prefill.h"

namespace sqz::cuda {

// to.stride: at least from.capacity; faults [lists].
Status list_runs(const RunLists& from, int lists, const PrefillRuns& to, uint32_t* faults,
                 cudaStream_t stream);

}  // namespace sqz::cuda
