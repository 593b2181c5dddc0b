#include "libruntime/cuda/static_lists.h"

#include <algorithm>

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {

Result<std::unique_ptr<StaticLists>> StaticLists::create(std::vector<HeadRuns> runs) {
  std::unique_ptr<StaticLists> out(new StaticLists);
  out->runs_ = std::move(runs);
  for (const HeadRuns& heads : out->runs_) {
    Layer& layer = out->layers_.emplace_back();
    for (const std::vector<KeyRun>& own : heads) {
      for (const KeyRun& run : own) layer.keys += run.length;
      layer.most_runs = std::max<int64_t>(layer.most_runs, std::ssize(own));
    }
  }
  SQZ_RETURN_IF_ERROR(take_memory(out->memory_, [&](void* base) { return out->lay_out(base); }));
  for (size_t l = 0; l < out->runs_.size(); ++l) {
    if (!out->runs_[l].empty()) {
      SQZ_RETURN_IF_ERROR(out->fill(out->runs_[l], out->layers_[l]));
    }
  }
  return out;
}

size_t StaticLists::lay_out(void* base) {
  Layout layout(base);
  for (size_t l = 0; l < layers_.size(); ++l) {
    RunLists& lists = layers_[l].lists;
    lists.capacity = layers_[l].most_runs;
    lists.of_heads = true;
    lists.lay_out(layout, std::ssize(runs_[l]));
  }
  return layout.used();
}

Status StaticLists::fill(const HeadRuns& heads, const Layer& to) {
  const size_t stride = at(to.most_runs) + 1;
  std::vector<RunTotals> totals(heads.size());
  std::vector<uint32_t> first(heads.size() * stride), before(first.size());
  for (size_t h = 0; h < heads.size(); ++h) {
    const std::vector<KeyRun>& own = heads[h];
    uint32_t keys = 0;
    for (size_t r = 0; r < own.size(); ++r) {
      first[h * stride + r] = own[r].first;
      before[h * stride + r] = keys;
      keys += own[r].length;
    }
    before[h * stride + own.size()] = keys;
    totals[h] = {static_cast<uint32_t>(own.size()), keys, 0, 0};
  }
  SQZ_RETURN_IF_ERROR(write_device(to.lists.totals, totals));
  SQZ_RETURN_IF_ERROR(write_device(to.lists.first, first));
  return write_device(to.lists.before, before);
}

}  // namespace sqz::cuda
