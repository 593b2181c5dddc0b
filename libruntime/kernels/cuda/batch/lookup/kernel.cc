#include "libruntime/kernels/cuda/batch/lookup/kernel.h"

#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/prefill/lookup/sm80/kernel.h"

namespace sqz::cuda {

template <int kDim>
Status launch_batch_lookup(const BatchLookup& call, int level, cudaStream_t stream);

namespace {

// A level alone, for the scores of all of its clusters: those that are not alive have none.
Sm80Lookup budget_of(const BatchLookup& call, int level) {
  Sm80Lookup budget;
  budget.token = call.lookup;
  budget.token.level[0] = call.lookup.level[level];
  budget.token.level[0].centroids = nullptr;  // they are counted already
  budget.token.levels = level + 1 == call.lookup.levels ? 1 : 2;
  budget.block = budget.token;
  budget.blocks = {call.lookup.requests, call.lookup.requests, 1, nullptr};
  budget.scores = call.scores;
  budget.chosen = call.chosen;
  budget.state = call.state;
  budget.faults = call.faults;
  return budget;
}

}  // namespace

Status batch_lookup(const BatchLookup& call, cudaStream_t stream) {
  for (int level = 0; level < call.lookup.levels; ++level) {
    SQZ_RETURN_IF_ERROR(for_dim(call.lookup.dim, no_such_dim(call.lookup.dim), [&](auto dim) {
      return launch_batch_lookup<dim.value>(call, level, stream);
    }));
    if (call.lookup.rule != LookupRule::kBudget) continue;
    SQZ_RETURN_IF_ERROR(sm80_choose(budget_of(call, level), 0, stream));
    SQZ_RETURN_IF_ERROR(launch_batch_chosen(call, level, stream));
  }
  return {};
}

}  // namespace sqz::cuda
