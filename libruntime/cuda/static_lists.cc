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
  std::vector<std::byte> host(out->lay_out(nullptr));
  out->lay_out(host.data());
  out->fill();
  SQZ_RETURN_IF_ERROR(out->memory_.reserve(host.size()));
  out->lay_out(out->memory_.data());
  SQZ_RETURN_IF_ERROR(copy_memory(out->memory_.data(), host.data(), host.size()));
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

// The lists, where they are in host memory.
void StaticLists::fill() {
  for (size_t l = 0; l < runs_.size(); ++l) {
    const RunLists& lists = layers_[l].lists;
    for (size_t h = 0; h < runs_[l].size(); ++h) {
      uint32_t* first = lists.first + h * at(lists.capacity + 1);
      uint32_t* before = lists.before + h * at(lists.capacity + 1);
      uint32_t keys = 0;
      for (const KeyRun& run : runs_[l][h]) {
        *first++ = run.first;
        *before++ = keys;
        keys += run.length;
      }
      *before = keys;
      lists.totals[h] = {static_cast<uint32_t>(runs_[l][h].size()), keys, 0, 0};
    }
  }
}

}  // namespace sqz::cuda
