#include "libruntime/cuda/stream_lists.h"

#include <algorithm>

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {

std::vector<KeyRun> StreamLists::runs_of(const ServedIndex& index, int64_t layer, int64_t head,
                                         int64_t recent) {
  const LayerView& view = index.layers[at(layer)];
  const uint32_t* positions = view.positions + head * view.slots;
  const int64_t first = index.metadata().sink + view.slots - recent;
  std::vector<KeyRun> runs;
  // A file whose positions are no permutation has more or fewer of them.
  int64_t left = recent;
  for (uint32_t slot = 0; slot < view.slots && left > 0; ++slot) {
    if (positions[slot] < first) continue;
    --left;
    if (!runs.empty() && runs.back().first + runs.back().length == slot) {
      ++runs.back().length;
    } else {
      runs.push_back({slot, 1});
    }
  }
  return runs;
}

Result<std::unique_ptr<StreamLists>> StreamLists::create(const ServedIndex& index,
                                                         std::span<const int64_t> recent) {
  std::unique_ptr<StreamLists> out(new StreamLists);
  out->layers_.resize(index.layers.size());
  const int64_t heads = index.metadata().model.kv_heads;
  std::vector<int64_t> most_runs;
  for (size_t l = 0; l < recent.size(); ++l) {
    most_runs.push_back(std::min(recent[l], (index.layers[l].slots + 1) / 2));
    out->keys_.push_back(heads * recent[l]);
  }
  SQZ_RETURN_IF_ERROR(out->memory_.reserve(out->lay_out(nullptr, heads, recent, most_runs)));
  out->lay_out(out->memory_.data(), heads, recent, most_runs);
  for (int64_t l = 0; l < std::ssize(index.layers); ++l) {
    if (recent[at(l)] > 0) SQZ_RETURN_IF_ERROR(out->fill(index, l, recent[at(l)]));
  }
  return out;
}

size_t StreamLists::lay_out(void* base, int64_t heads, std::span<const int64_t> recent,
                            const std::vector<int64_t>& most_runs) {
  Layout layout(base);
  for (size_t l = 0; l < layers_.size(); ++l) {
    const int64_t marks = (recent[l] + kMarkKeys - 1) / kMarkKeys;
    const int64_t stride = most_runs[l];
    RunLists& decode = layers_[l].decode;
    decode.capacity = stride;
    decode.mark_capacity = marks;
    decode.of_heads = true;
    decode.totals = layout.take<RunTotals>(heads);
    decode.first = layout.take<uint32_t>(heads * (stride + 1));
    decode.before = layout.take<uint32_t>(heads * (stride + 1));
    decode.marks = layout.take<uint32_t>(heads * marks);
    PrefillRuns& prefill = layers_[l].prefill;
    prefill.runs = layout.take<uint2>(heads * stride);
    prefill.prefix = layout.take<uint32_t>(heads * stride);
    prefill.counts = layout.take<uint32_t>(heads);
    prefill.totals = layout.take<uint32_t>(heads);
    prefill.stride = static_cast<int32_t>(stride);
  }
  return layout.used();
}

Status StreamLists::fill(const ServedIndex& index, int64_t layer, int64_t recent) {
  const Layer& to = layers_[at(layer)];
  const auto heads = at(index.metadata().model.kv_heads);
  const size_t stride = at(to.decode.capacity), marked = at(to.decode.mark_capacity);
  std::vector<RunTotals> totals(heads);
  std::vector<uint32_t> counts(heads), all(heads), prefix(heads * stride);
  std::vector<uint32_t> first(heads * (stride + 1)), before(first.size()), marks(heads * marked);
  std::vector<uint2> runs(prefix.size());
  for (size_t h = 0; h < heads; ++h) {
    const std::vector<KeyRun> own = runs_of(index, layer, static_cast<int64_t>(h), recent);
    uint32_t keys = 0;
    for (size_t r = 0; r < own.size(); ++r) {
      first[h * (stride + 1) + r] = own[r].first;
      before[h * (stride + 1) + r] = prefix[h * stride + r] = keys;
      runs[h * stride + r] = {own[r].first, own[r].length};
      const uint32_t end = keys + own[r].length;
      for (uint32_t m = (keys + kMarkKeys - 1) / kMarkKeys; m * kMarkKeys < end; ++m) {
        marks[h * marked + m] = static_cast<uint32_t>(r);
      }
      keys = end;
    }
    before[h * (stride + 1) + own.size()] = all[h] = keys;
    counts[h] = static_cast<uint32_t>(own.size());
    totals[h] = {counts[h], keys, 0, 0};
  }
  const auto copy = [](auto* device, const auto& from) {
    return cudaMemcpy(device, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice);
  };
  SQZ_RETURN_IF_CUDA_ERROR(copy(to.decode.totals, totals));
  SQZ_RETURN_IF_CUDA_ERROR(copy(to.decode.first, first));
  SQZ_RETURN_IF_CUDA_ERROR(copy(to.decode.before, before));
  SQZ_RETURN_IF_CUDA_ERROR(copy(to.decode.marks, marks));
  SQZ_RETURN_IF_CUDA_ERROR(copy(to.prefill.runs, runs));
  SQZ_RETURN_IF_CUDA_ERROR(copy(to.prefill.prefix, prefix));
  SQZ_RETURN_IF_CUDA_ERROR(copy(to.prefill.counts, counts));
  SQZ_RETURN_IF_CUDA_ERROR(copy(to.prefill.totals, all));
  return {};
}

}  // namespace sqz::cuda
