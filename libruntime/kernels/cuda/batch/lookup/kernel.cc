#include "libruntime/kernels/cuda/batch/lookup/kernel.h"

#include <cmath>

#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/prefill/lookup/select.h"

namespace sqz::cuda {

template <int kDim>
Status launch_batch_lookup(const BatchLookup& call, int level, cudaStream_t stream);

namespace {

// Clusters of a request that are not alive have no score.
SelectRuns budget_of(const BatchLookup& call, int level) {
  const LookupParams& lookup = call.lookup;
  const LookupLevel& from = lookup.level[level];
  SelectRuns select;
  select.blocks = {lookup.requests, lookup.requests, 1, nullptr};
  select.shape.kv_heads = lookup.kv_heads;
  select.level = {from};
  if (lookup.own != nullptr) select.level.clusters = static_cast<int32_t>(lookup.width);
  select.own = lookup.own;
  select.depth = level;
  select.level.finest = level + 1 == lookup.levels;
  select.level.log_threshold[0] = from.threshold * static_cast<float>(M_LN2);
  select.level.wanted[0] = lookup.wanted;
  select.scores = call.scores;
  select.stride = call.score_stride();
  select.bits = call.chosen;
  select.faults = call.faults;
  select.counters = lookup.counters;
  return select;
}

}  // namespace

Status batch_lookup(const BatchLookup& call, cudaStream_t stream) {
  for (int level = 0; level < call.lookup.levels; ++level) {
    SQZ_RETURN_IF_ERROR(for_dim(call.lookup.dim, no_such_dim(call.lookup.dim), [&](auto dim) {
      return launch_batch_lookup<dim.value>(call, level, stream);
    }));
    if (call.lookup.rule != LookupRule::kBudget) continue;
    SQZ_RETURN_IF_ERROR(launch_select(budget_of(call, level), call.lookup.device, stream));
    SQZ_RETURN_IF_ERROR(launch_batch_chosen(call, level, stream));
  }
  if (call.lookup.levels == 0) return launch_batch_chosen(call, 0, stream);
  return {};
}

}  // namespace sqz::cuda
