// The steps of a batch's lookup that do not depend on the head dimension.
#pragma once

#include "libruntime/kernels/cuda/batch_lookup/kernel.h"

namespace sqz::cuda {

// From logits and sums of a level, of so many parts: by the rule kThreshold to words of what is
// chosen, and from these to those of the children, or to runs and masks; by the rule kBudget to
// scores.
Status launch_batch_choose(const BatchLookup& call, int level, int parts, cudaStream_t stream);

// The rule kBudget: from scores to words, and on.
Status launch_batch_budget(const BatchLookup& call, int level, cudaStream_t stream);

}  // namespace sqz::cuda
