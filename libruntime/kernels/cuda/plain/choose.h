// The steps of a plain lookup that do not depend on the head dimension.
#pragma once

#include "libruntime/kernels/cuda/plain/kernel.h"

namespace sqz::cuda {

// call.lse from call.sums, and call.faults.
Status plain_lse(const PlainLookup& call, cudaStream_t stream);

// From the scores of a level to what is alive at the next one, or to runs.
Status plain_choose(const PlainLookup& call, int level, cudaStream_t stream);

}  // namespace sqz::cuda
