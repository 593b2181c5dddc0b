// Selections that no query changes (stream, window, h2o): every layer and KV head has one, made
// when the session is created from the number of keys that the layer's budget pays.
#pragma once

#include <functional>
#include <span>

#include "libruntime/select/registry.h"

namespace sqz {

// One KV head of one layer.
struct StaticHead {
  const LayerView& view;
  int64_t kv_head = 0;
  int64_t sink = 0;  // tokens before the first clustered one
  int64_t keys = 0;  // clustered keys to choose: 0 .. slots
  const uint32_t* positions() const { return view.positions + kv_head * view.slots; }
};

struct StaticSelection {
  const char* name;           // "stream": for messages
  int64_t exact_skipped = 0;  // first exact keys that are not read
  // Sets `keys` bytes of `chosen`, [slots] zeros. The same for any order of slots.
  std::function<void(const StaticHead&, std::span<uint8_t> chosen)> choose;
};

Result<PreparedSelector> prepare_static(const SelectorInputs& inputs,
                                        const SelectionRequest& request,
                                        const StaticSelection& selection);

// Whether a selector is one of these: an index can be pruned for it.
bool is_static(SelectorKind selector);

// The `count` clustered tokens with the highest positions.
void choose_recent(const StaticHead& head, int64_t count, std::span<uint8_t> chosen);

}  // namespace sqz
