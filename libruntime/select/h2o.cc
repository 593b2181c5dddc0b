// The selector `h2o` (heavy hitters): of the keys that the budget pays, half are the most recent
// ones and half those that the tokens of the context itself gave most attention to. Their order is
// part of the index (LayerView::heavy), so that nothing is scored when serving.
#include "libruntime/select/static_selection.h"

namespace sqz {
namespace {

void choose(const StaticHead& head, std::span<uint8_t> chosen) {
  int64_t left = head.keys / 2;
  choose_recent(head, head.keys - left, chosen);
  const uint32_t* heavy = head.view.heavy + head.kv_head * head.view.slots;
  for (int64_t i = 0; left > 0 && i < head.view.slots; ++i) {
    uint8_t& slot = chosen[heavy[i]];
    left -= slot == 0;
    slot = 1;
  }
}

// Whether the order names every slot once: choose() follows it.
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

Result<PreparedSelector> prepare_h2o(const SelectorInputs& inputs,
                                     const SelectionRequest& request) {
  const LayerView* sparse = first_sparse(inputs.index.layers);
  if (inputs.metadata.pruned)
    return prepare_static(inputs, request, {.name = "h2o", .choose = choose});
  if (sparse != nullptr && sparse->heavy == nullptr) {
    return Status(Code::kUnsupported,
                  bad_field(inputs.path, "order of heavy hitters", "none",
                            "one: selector h2o needs an index built with --heavy-hitters"));
  }
  for (size_t layer = 0; layer < inputs.index.layers.size(); ++layer) {
    SQZ_RETURN_IF_ERROR(
        check_order(inputs.index.layers[layer], static_cast<int64_t>(layer), inputs.path));
  }
  return prepare_static(inputs, request, {.name = "h2o", .choose = choose});
}

}  // namespace sqz
