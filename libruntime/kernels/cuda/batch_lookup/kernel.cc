#include "libruntime/kernels/cuda/batch_lookup/kernel.h"

#include <algorithm>

#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/prefill_sm80/kernel.h"

namespace sqz::cuda {

template <int kDim>
Status launch_batch_logits(const BatchLookup& call, int level, int parts, cudaStream_t stream);

namespace {

// As many blocks of threads as the GPU holds at once, of about as many tiles each.
int parts_of(const BatchLookup& call, int level) {
  constexpr int kBlocks = 4;  // a multiprocessor
  const int rows = call.chunk * call.lookup.group, row_tiles = (rows + kBatchTile - 1) / kBatchTile;
  const int tiles = (call.lookup.level[level].clusters + kBatchTile - 1) / kBatchTile;
  const int most = kBlocks * call.lookup.device.multiprocessors / (call.lists() * row_tiles);
  const int each =
      (tiles + std::clamp(most, 1, kBatchParts) - 1) / std::clamp(most, 1, kBatchParts);
  return std::max(1, each == 0 ? 1 : (tiles + each - 1) / each);
}

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
  budget.faults = call.pair_faults;
  return budget;
}

}  // namespace

Status batch_lookup(const BatchLookup& call, cudaStream_t stream) {
  for (int level = 0; level < call.lookup.levels; ++level) {
    const int parts = parts_of(call, level);
    SQZ_RETURN_IF_ERROR(for_dim(call.lookup.dim, no_such_dim(call.lookup.dim), [&](auto dim) {
      return launch_batch_logits<dim.value>(call, level, parts, stream);
    }));
    SQZ_RETURN_IF_ERROR(launch_batch_choose(call, level, parts, stream));
    if (call.lookup.rule != LookupRule::kBudget) continue;
    SQZ_RETURN_IF_ERROR(sm80_choose(budget_of(call, level), 0, stream));
    SQZ_RETURN_IF_ERROR(launch_batch_budget(call, level, stream));
  }
  return {};
}

}  // namespace sqz::cuda
