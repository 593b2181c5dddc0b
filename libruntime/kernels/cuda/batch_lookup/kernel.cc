#include "libruntime/kernels/cuda/batch_lookup/kernel.h"

#include <algorithm>

#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/plain/kernel.h"

namespace sqz::cuda {

namespace {

// As many blocks of threads as the GPU holds at once, of about as many tiles each.
int parts_of(const BatchLookup& call, int level) {
  constexpr int kTile = 64;  // clusters
  const int rows = call.chunk * BatchLookup::padded(call.lookup.group);
  const int at_once = (rows > kBatchRows / 2 ? 3 : 4) * call.lookup.device.multiprocessors;
  const int tiles = (call.lookup.level[level].clusters + kTile - 1) / kTile;
  const int most = std::clamp(at_once / call.lists(), 1, kBatchParts);
  const int each = std::max(1, (tiles + most - 1) / most);
  return std::max(1, (tiles + each - 1) / each);
}

// A level alone, for the scores of all of its clusters: those that are not alive have none.
PlainLookup budget_of(const BatchLookup& call, int level) {
  PlainLookup plain;
  plain.token = call.lookup;
  plain.token.level[0] = call.lookup.level[level];
  plain.token.level[0].centroids = nullptr;  // they are counted already
  plain.token.levels = level + 1 == call.lookup.levels ? 1 : 2;
  plain.block = plain.token;
  plain.blocks = {call.lookup.requests, call.lookup.requests, 1, nullptr};
  plain.scores = call.scores;
  plain.state = call.state;
  plain.faults = call.pair_faults;
  return plain;
}

}  // namespace

Status batch_lookup(const BatchLookup& call, cudaStream_t stream) {
  for (int level = 0; level < call.lookup.levels; ++level) {
    const int parts = parts_of(call, level);
    SQZ_RETURN_IF_ERROR(for_dim(call.lookup.dim, no_such_dim(call.lookup.dim), [&](auto dim) {
      SQZ_RETURN_IF_ERROR(launch_batch_sums<dim.value>(call, level, parts, stream));
      return launch_batch_choose<dim.value>(call, level, parts, stream);
    }));
    if (call.lookup.rule != LookupRule::kBudget) continue;
    SQZ_RETURN_IF_ERROR(plain_choose(budget_of(call, level), 0, stream));
    SQZ_RETURN_IF_ERROR(launch_batch_budget(call, level, stream));
  }
  return {};
}

}  // namespace sqz::cuda
