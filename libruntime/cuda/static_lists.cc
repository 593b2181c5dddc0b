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
      int64_t keys = 0;
      for (const KeyRun& run : own) keys += run.length;
      layer.keys += keys;
      layer.most_keys = std::max(layer.most_keys, keys);
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
    lists.mark_capacity = (layers_[l].most_keys + kMarkKeys - 1) / kMarkKeys;
    lists.of_heads = true;
    lists.lay_out(layout, std::ssize(runs_[l]));
  }
  return layout.used();
}

Status StaticLists::fill(const HeadRuns& heads, const Layer& to) {
  const size_t stride = at(to.most_runs) + 1, marked = at(to.lists.mark_capacity);
  std::vector<RunTotals> totals(heads.size());
  std::vector<uint32_t> first(heads.size() * stride), before(first.size());
  std::vector<uint32_t> marks(heads.size() * marked);
  for (size_t h = 0; h < heads.size(); ++h) {
    const std::vector<KeyRun>& own = heads[h];
    uint32_t keys = 0;
    for (size_t r = 0; r < own.size(); ++r) {
      first[h * stride + r] = own[r].first;
      before[h * stride + r] = keys;
      const uint32_t end = keys + own[r].length;
      for (uint32_t m = (keys + kMarkKeys - 1) / kMarkKeys; m * kMarkKeys < end; ++m) {
        marks[h * marked + m] = static_cast<uint32_t>(r);
      }
      keys = end;
    }
    before[h * stride + own.size()] = keys;
    totals[h] = {static_cast<uint32_t>(own.size()), keys, 0, 0};
  }
  SQZ_RETURN_IF_ERROR(write_device(to.lists.totals, totals));
  SQZ_RETURN_IF_ERROR(write_device(to.lists.first, first));
  SQZ_RETURN_IF_ERROR(write_device(to.lists.before, before));
  return write_device(to.lists.marks, marks);
}

}  // namespace sqz::cuda
