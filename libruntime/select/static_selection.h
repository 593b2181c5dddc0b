// Selections that no query changes (dense, stream, window, h2o): every layer and KV head has one
// list of keys, made when the session is created from the number of keys that the layer's budget
// pays.
#pragma once

#include <memory>

#include "libruntime/select/plan.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/selector.h"

namespace sqz {

// Whether a selector is stream, window or h2o: an index can be pruned for it.
bool is_static(SelectorKind selector);

// One KV head of one layer.
struct StaticHead {
  const LayerView& view;
  int64_t kv_head = 0;
  int64_t sink = 0;  // tokens before the first clustered one
  int64_t keys = 0;  // clustered keys to choose: 0 .. slots
};

// Sets `keys` bytes of `chosen`, [slots] zeros. The same for any order of slots.
using ListKeys = void(const StaticHead&, std::span<uint8_t> chosen);
// The most recent keys. With the sinks that is StreamingLLM, without them sliding window attention.
// In token order they are one run, in cluster order many short ones.
ListKeys list_recent;
// Heavy hitters: half the most recent keys, half those that the tokens of the context itself gave
// most attention to, in an order that is part of the index (LayerView::heavy).
ListKeys list_heavy;
// Whether that order is there and names every slot once.
Status check_heavy(const SelectorInputs& inputs, const SelectionRequest& request);

// `exact_skipped`: first exact keys that are not read.
std::unique_ptr<Selector> make_static_selector(const SelectorInputs& inputs,
                                               const SelectionPlan& plan, int64_t exact_skipped,
                                               ListKeys* list);
// Every key. Sessions have one beside their own selector, for the layers that are read whole.
std::unique_ptr<Selector> make_dense_selector(const SelectableIndex& index,
                                              int64_t exact_skipped = 0);

}  // namespace sqz
