#include "libruntime/select/static_selection.h"

#include <algorithm>

#include "libruntime/select/layer_spread.h"

namespace sqz {
namespace {

struct HeadRuns {
  std::vector<KeyRun> runs;
  int64_t keys = 0;
};

class StaticSelector final : public Selector {
 public:
  using Heads = std::vector<std::vector<HeadRuns>>;  // [layers][Hkv]

  StaticSelector(Heads heads, int64_t exact_skipped)
      : heads_(std::move(heads)), exact_skipped_(exact_skipped) {}

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const std::vector<HeadRuns>& layer : heads_) {
      for (const HeadRuns& head : layer) {
        limits.read = std::max(limits.read, std::ssize(head.runs));
      }
    }
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& /*workspace*/,
                HeadSelection& out) const override {
    const HeadRuns& head = heads_[query.layer][query.kv_head];
    out.clear();
    std::copy(head.runs.begin(), head.runs.end(), out.read.room.begin());
    out.read.count = std::ssize(head.runs);
    out.read.total = head.keys;
    out.exact_skipped = exact_skipped_;
    return {};
  }

 private:
  Heads heads_;
  int64_t exact_skipped_;
};

HeadRuns runs_of(std::span<const uint8_t> chosen) {
  HeadRuns out;
  for (uint32_t slot = 0; slot < chosen.size(); ++slot) {
    if (chosen[slot] == 0) continue;
    ++out.keys;
    extend(out.runs, {slot, 1});
  }
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

}  // namespace

bool is_static(SelectorKind selector) {
  return selector == SelectorKind::kStream || selector == SelectorKind::kWindow ||
         selector == SelectorKind::kH2o;
}

void list_recent(const StaticHead& head, std::span<uint8_t> chosen) {
  choose_last(head, head.keys, chosen);
}

void list_heavy(const StaticHead& head, std::span<uint8_t> chosen) {
  int64_t left = head.keys / 2;
  choose_last(head, head.keys - left, chosen);
  const uint32_t* heavy = head.view.heavy + head.kv_head * head.view.slots;
  for (int64_t i = 0; left > 0 && i < head.view.slots; ++i) {
    uint8_t& slot = chosen[heavy[i]];
    left -= slot == 0;
    slot = 1;
  }
}

Status check_heavy(const SelectorInputs& inputs, const SelectionRequest&) {
  if (!inputs.metadata.heavy_hitters) {
    return {Code::kUnsupported,
            bad_field(inputs.path, "order of heavy hitters", "none",
                      "one: selector h2o needs an index built with --heavy-hitters")};
  }
  std::vector<bool> seen;
  for (size_t layer = 0; layer < inputs.index.layers.size(); ++layer) {
    const LayerView& view = inputs.index.layers[layer];
    for (int64_t i = 0; i < view.kv_heads * view.slots; ++i) {
      if (i % view.slots == 0) seen.assign(static_cast<size_t>(view.slots), false);
      const uint32_t slot = view.heavy[i];
      if (slot >= view.slots || seen[slot]) {
        return {Code::kCorrupt,
                bad_field(inputs.path, concat("layers.", layer, ".heavy[", i, "]"), concat(slot),
                          concat("each slot below ", view.slots, " once a KV head"))};
      }
      seen[slot] = true;
    }
  }
  return {};
}

std::unique_ptr<Selector> make_static_selector(const SelectorInputs& inputs,
                                               const SelectionPlan& plan, int64_t exact_skipped,
                                               ListKeys* list) {
  const std::span<const LayerView> layers = inputs.index.layers;
  const std::vector<int64_t> keys = layer_keys(plan, first_sparse(layers)->slots);
  StaticSelector::Heads heads(layers.size());
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const LayerView& view = layers[layer];
    for (int64_t head = 0; head < view.kv_heads; ++head) {
      std::vector<uint8_t> chosen(static_cast<size_t>(view.slots), 0);
      if (plan.layer_keep[layer] > 0) list({view, head, inputs.metadata.sink, keys[layer]}, chosen);
      heads[layer].push_back(runs_of(chosen));
    }
  }
  return std::make_unique<StaticSelector>(std::move(heads), exact_skipped);
}

std::unique_ptr<Selector> make_dense_selector(const SelectableIndex& index, int64_t exact_skipped) {
  StaticSelector::Heads heads;
  for (const LayerView& view : index.layers) {
    HeadRuns all;
    all.keys = view.slots;
    if (view.slots > 0) all.runs.push_back({0, static_cast<uint32_t>(view.slots)});
    heads.emplace_back(static_cast<size_t>(view.kv_heads), all);
  }
  return std::make_unique<StaticSelector>(std::move(heads), exact_skipped);
}

}  // namespace sqz
