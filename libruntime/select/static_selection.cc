#include "libruntime/select/static_selection.h"

#include <algorithm>
#include <cmath>

#include "libruntime/select/layer_spread.h"
#include "libruntime/select/runs.h"

namespace sqz {
namespace {

struct HeadRuns {
  std::vector<KeyRun> runs;
  int64_t keys = 0;
};

class StaticSelector final : public Selector {
 public:
  StaticSelector(std::vector<HeadRuns> heads, int64_t kv_heads, int64_t exact_skipped)
      : heads_(std::move(heads)), kv_heads_(kv_heads), exact_skipped_(exact_skipped) {}

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const HeadRuns& head : heads_) limits.runs = std::max(limits.runs, std::ssize(head.runs));
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& /*workspace*/,
                HeadSelection& out) const override {
    const HeadRuns& head = heads_[query.layer * kv_heads_ + query.kv_head];
    clear(out);
    std::copy(head.runs.begin(), head.runs.end(), out.runs.begin());
    out.run_count = std::ssize(head.runs);
    out.keys = head.keys;
    out.exact_skipped = exact_skipped_;
    return {};
  }

 private:
  std::vector<HeadRuns> heads_;  // [layer * kv_heads + head]
  int64_t kv_heads_, exact_skipped_;
};

HeadRuns runs_of(std::span<const uint8_t> chosen) {
  HeadRuns out;
  for (uint32_t slot = 0; slot < chosen.size(); ++slot) {
    if (chosen[slot] == 0) continue;
    ++out.keys;
    if (out.runs.empty() || out.runs.back().first + out.runs.back().length != slot) {
      out.runs.push_back({slot, 0});
    }
    ++out.runs.back().length;
  }
  return out;
}

// All that is left of a pruned index, if that is what is asked for.
Result<PreparedSelector> prepare_pruned(const SelectorInputs& inputs,
                                        const SelectionRequest& request,
                                        const StaticSelection& selection) {
  SQZ_RETURN_IF_ERROR(check_plain(request, selection.name, false));
  const IndexMetadata& metadata = inputs.metadata;
  const auto refuse = [&](const char* option, const std::string& found, const auto&... expected) {
    return Status(Code::kInvalidArgument,
                  concat(inputs.path, ": ", option, ": found ", found, ", expected ", expected...,
                         ", what the index was pruned for"));
  };
  const auto differs = [](double asked, double kept) {
    return asked != 0 && std::abs(asked - kept) > 1e-9;
  };
  if (differs(request.budget, metadata.pruned->budget)) {
    return refuse("budget", concat(request.budget), metadata.pruned->budget, " or none");
  }
  if (differs(request.keep, metadata.pruned->keep)) {
    return refuse("keep", concat(request.keep), metadata.pruned->keep, " or none");
  }
  if (!request.layer_scales.empty()) {
    return Status(Code::kInvalidArgument,
                  concat(inputs.path, ": layer_scales: found ", request.layer_scales.size(),
                         ", expected none: each layer was left the keys of its own budget when the "
                         "index was pruned"));
  }
  if (request.dense_layers > 0) {
    return refuse("dense_layers", concat(request.dense_layers), "0");
  }
  PreparedSelector out;
  out.plan.asked_budget = out.plan.least_budget = metadata.pruned->budget;
  out.plan.asked_keep = metadata.pruned->keep;
  std::vector<HeadRuns> heads;
  for (const LayerView& view : inputs.index.layers) {
    out.plan.layer_keep.push_back(view.slots > 0 ? 1 : 0);
    HeadRuns all;
    all.keys = view.slots;
    if (view.slots > 0) all.runs.push_back({0, static_cast<uint32_t>(view.slots)});
    heads.insert(heads.end(), static_cast<size_t>(metadata.model.kv_heads), all);
  }
  out.selector = std::make_unique<StaticSelector>(std::move(heads), metadata.model.kv_heads,
                                                  selection.exact_skipped);
  return out;
}

}  // namespace

bool is_static(SelectorKind selector) {
  return selector == SelectorKind::kStream || selector == SelectorKind::kWindow ||
         selector == SelectorKind::kH2o;
}

void choose_recent(const StaticHead& head, int64_t count, std::span<uint8_t> chosen) {
  const uint32_t* positions = head.positions();
  const int64_t first = head.sink + head.view.slots - count;
  for (size_t slot = 0; slot < chosen.size(); ++slot) {
    if (positions[slot] >= first) chosen[slot] = 1;
  }
}

Result<PreparedSelector> prepare_static(const SelectorInputs& inputs,
                                        const SelectionRequest& request,
                                        const StaticSelection& selection) {
  if (inputs.metadata.pruned) return prepare_pruned(inputs, request, selection);
  SQZ_RETURN_IF_ERROR(check_amount(request));
  SQZ_RETURN_IF_ERROR(check_plain(request, selection.name, false));
  const LayerView* sparse = first_sparse(inputs.index.layers);
  PreparedSelector out;
  if (sparse == nullptr) return PreparedSelector{nothing_sparse_plan(request), nullptr};
  const ReadingCost cost = keys_cost(*sparse, selection.exact_skipped);
  resolve(cost, request, out.plan);
  SQZ_RETURN_IF_ERROR(settle(cost, request, inputs.path, out.plan));
  if (out.plan.dense) return out;
  out.plan.layer_keep = inputs.layer_keep;
  const std::vector<int64_t> keys = layer_keys(out.plan, sparse->slots);
  const int64_t kv_heads = inputs.metadata.model.kv_heads;
  std::vector<HeadRuns> heads;
  std::vector<uint8_t> chosen;
  for (size_t layer = 0; layer < inputs.index.layers.size(); ++layer) {
    const LayerView& view = inputs.index.layers[layer];
    for (int64_t head = 0; head < kv_heads; ++head) {
      chosen.assign(static_cast<size_t>(view.slots), 0);
      if (out.plan.layer_keep[layer] > 0) {
        selection.choose({view, head, inputs.metadata.sink, keys[layer]}, chosen);
      }
      heads.push_back(runs_of(chosen));
    }
  }
  out.selector =
      std::make_unique<StaticSelector>(std::move(heads), kv_heads, selection.exact_skipped);
  return out;
}

}  // namespace sqz
