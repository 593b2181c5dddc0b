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
  SQZ_RETURN_IF_ERROR(out->memory_.reserve(out->lay_out(nullptr)));
  out->lay_out(out->memory_.data());
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
    const int64_t heads = std::ssize(runs_[l]);
    const int64_t stride = layers_[l].most_runs;
    RunLists& decode = layers_[l].decode;
    decode.capacity = stride;
    decode.mark_capacity = (layers_[l].most_keys + kMarkKeys - 1) / kMarkKeys;
    decode.of_heads = true;
    decode.totals = layout.take<RunTotals>(heads);
    decode.first = layout.take<uint32_t>(heads * (stride + 1));
    decode.before = layout.take<uint32_t>(heads * (stride + 1));
    decode.marks = layout.take<uint32_t>(heads * decode.mark_capacity);
    PrefillRuns& prefill = layers_[l].prefill;
    prefill.runs = layout.take<uint2>(heads * stride);
    prefill.prefix = layout.take<uint32_t>(heads * stride);
    prefill.counts = layout.take<uint32_t>(heads);
    prefill.totals = layout.take<uint32_t>(heads);
    prefill.stride = static_cast<int32_t>(stride);
  }
  return layout.used();
}

Status StaticLists::fill(const HeadRuns& heads, const Layer& to) {
  const size_t stride = at(to.most_runs), marked = at(to.decode.mark_capacity);
  std::vector<RunTotals> totals(heads.size());
  std::vector<uint32_t> counts(heads.size()), all(heads.size()), prefix(heads.size() * stride);
  std::vector<uint32_t> first(heads.size() * (stride + 1)), before(first.size());
  std::vector<uint32_t> marks(heads.size() * marked);
  std::vector<uint2> runs(prefix.size());
  for (size_t h = 0; h < heads.size(); ++h) {
    const std::vector<KeyRun>& own = heads[h];
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
    const size_t bytes = from.size() * sizeof(from[0]);
    return cuda_status(cudaMemcpy(device, from.data(), bytes, cudaMemcpyHostToDevice),
                       "cudaMemcpy");
  };
  SQZ_RETURN_IF_ERROR(copy(to.decode.totals, totals));
  SQZ_RETURN_IF_ERROR(copy(to.decode.first, first));
  SQZ_RETURN_IF_ERROR(copy(to.decode.before, before));
  SQZ_RETURN_IF_ERROR(copy(to.decode.marks, marks));
  SQZ_RETURN_IF_ERROR(copy(to.prefill.runs, runs));
  SQZ_RETURN_IF_ERROR(copy(to.prefill.prefix, prefix));
  SQZ_RETURN_IF_ERROR(copy(to.prefill.counts, counts));
  SQZ_RETURN_IF_ERROR(copy(to.prefill.totals, all));
  return {};
}

}  // namespace sqz::cuda
