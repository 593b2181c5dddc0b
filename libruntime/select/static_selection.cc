// Selections that no query changes (dense, stream, window, h2o): every layer and KV head has one,
// made when the session is created from the number of keys that the layer's budget pays.
#include "libruntime/select/static_selection.h"

#include <algorithm>
#include <cmath>

#include "libruntime/select/layer_spread.h"
#include "libruntime/select/registry.h"

namespace sqz {
namespace {

// One KV head of one layer.
struct StaticHead {
  const LayerView& view;
  int64_t kv_head = 0;
  int64_t sink = 0;  // tokens before the first clustered one
  int64_t keys = 0;  // clustered keys to choose: 0 .. slots
};

struct StaticSelection {
  const char* name;           // "stream": for messages
  int64_t exact_skipped = 0;  // first exact keys that are not read
  // Sets `keys` bytes of `chosen`, [slots] zeros. The same for any order of slots.
  void (*choose)(const StaticHead&, std::span<uint8_t> chosen) = nullptr;
};

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
    for (const HeadRuns& head : heads_) limits.read = std::max(limits.read, std::ssize(head.runs));
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& /*workspace*/,
                HeadSelection& out) const override {
    const HeadRuns& head = heads_[query.layer * kv_heads_ + query.kv_head];
    out.clear();
    std::copy(head.runs.begin(), head.runs.end(), out.read.room.begin());
    out.read.count = std::ssize(head.runs);
    out.read.total = head.keys;
    out.exact_skipped = exact_skipped_;
    return {};
  }

 private:
  std::vector<HeadRuns> heads_;  // [layer * kv_heads + head]
  int64_t kv_heads_, exact_skipped_;
};

// Every key of every layer.
std::unique_ptr<Selector> read_all(std::span<const LayerView> layers, int64_t exact_skipped) {
  std::vector<HeadRuns> heads;
  for (const LayerView& view : layers) {
    HeadRuns all;
    all.keys = view.slots;
    if (view.slots > 0) all.runs.push_back({0, static_cast<uint32_t>(view.slots)});
    heads.insert(heads.end(), static_cast<size_t>(view.kv_heads), all);
  }
  return std::make_unique<StaticSelector>(std::move(heads), layers[0].kv_heads, exact_skipped);
}

HeadRuns runs_of(std::span<const uint8_t> chosen) {
  HeadRuns out;
  for (uint32_t slot = 0; slot < chosen.size(); ++slot) {
    if (chosen[slot] == 0) continue;
    ++out.keys;
    extend(out.runs, {slot, 1});
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
  for (const LayerView& view : inputs.index.layers) {
    out.plan.layer_keep.push_back(view.slots > 0 ? 1 : 0);
  }
  out.selector = read_all(inputs.index.layers, selection.exact_skipped);
  return out;
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

// The `count` clustered tokens with the highest positions.
void choose_last(const StaticHead& head, int64_t count, std::span<uint8_t> chosen) {
  const uint32_t* positions = head.view.positions + head.kv_head * head.view.slots;
  const int64_t first = head.sink + head.view.slots - count;
  for (size_t slot = 0; slot < chosen.size(); ++slot) {
    if (positions[slot] >= first) chosen[slot] = 1;
  }
}

void choose_recent(const StaticHead& head, std::span<uint8_t> chosen) {
  choose_last(head, head.keys, chosen);
}

// Half the most recent ones, half those that got most attention, in an order that is part of the
// index (LayerView::heavy).
void choose_heavy(const StaticHead& head, std::span<uint8_t> chosen) {
  int64_t left = head.keys / 2;
  choose_last(head, head.keys - left, chosen);
  const uint32_t* heavy = head.view.heavy + head.kv_head * head.view.slots;
  for (int64_t i = 0; left > 0 && i < head.view.slots; ++i) {
    uint8_t& slot = chosen[heavy[i]];
    left -= slot == 0;
    slot = 1;
  }
}

// Whether the order names every slot once: choose_heavy() follows it.
Status check_order(const LayerView& view, int64_t layer, const std::string& path) {
  std::vector<bool> seen;
  for (int64_t i = 0; i < view.kv_heads * view.slots; ++i) {
    if (i % view.slots == 0) seen.assign(static_cast<size_t>(view.slots), false);
    const uint32_t slot = view.heavy[i];
    if (slot < view.slots && !seen[slot]) {
      seen[slot] = true;
      continue;
    }
    return {Code::kCorrupt,
            bad_field(path, concat("layers.", layer, ".heavy[", i, "]"), concat(slot),
                      concat("each slot below ", view.slots, " once a KV head"))};
  }
  return {};
}

}  // namespace

bool is_static(SelectorKind selector) {
  return selector == SelectorKind::kStream || selector == SelectorKind::kWindow ||
         selector == SelectorKind::kH2o;
}

std::unique_ptr<Selector> make_dense_selector(const SelectableIndex& index) {
  return read_all(index.layers, 0);
}

Result<PreparedSelector> prepare_dense(const SelectorInputs&, const SelectionRequest& request) {
  if (request.budget != 0 || request.keep != 0 || request.thresholds != nullptr) {
    return Status(Code::kInvalidArgument,
                  "selector dense reads everything: found a budget, keep or thresholds, "
                  "expected none");
  }
  return PreparedSelector{dense_plan({}, false), nullptr};
}

// StreamingLLM: sink and tail are always read; of the keys between them, those with the highest
// token positions, as many as the budget leaves. In token order they are one run, in cluster order
// many short ones.
Result<PreparedSelector> prepare_stream(const SelectorInputs& inputs,
                                        const SelectionRequest& request) {
  return prepare_static(inputs, request, {.name = "stream", .choose = choose_recent});
}

// Sliding window attention: the most recent keys alone, without the sink that StreamingLLM adds.
// Layers that are read whole have theirs.
Result<PreparedSelector> prepare_window(const SelectorInputs& inputs,
                                        const SelectionRequest& request) {
  return prepare_static(
      inputs, request,
      {.name = "window", .exact_skipped = inputs.metadata.sink, .choose = choose_recent});
}

// Heavy hitters: of the keys that the budget pays, half are the most recent ones and half those
// that the tokens of the context itself gave most attention to.
Result<PreparedSelector> prepare_h2o(const SelectorInputs& inputs,
                                     const SelectionRequest& request) {
  const StaticSelection selection = {.name = "h2o", .choose = choose_heavy};
  if (inputs.metadata.pruned) return prepare_static(inputs, request, selection);
  const LayerView* sparse = first_sparse(inputs.index.layers);
  if (sparse != nullptr && sparse->heavy == nullptr) {
    return Status(Code::kUnsupported,
                  bad_field(inputs.path, "order of heavy hitters", "none",
                            "one: selector h2o needs an index built with --heavy-hitters"));
  }
  for (size_t layer = 0; layer < inputs.index.layers.size(); ++layer) {
    SQZ_RETURN_IF_ERROR(
        check_order(inputs.index.layers[layer], static_cast<int64_t>(layer), inputs.path));
  }
  return prepare_static(inputs, request, selection);
}

}  // namespace sqz
