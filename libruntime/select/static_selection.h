// Selections that no query changes; the selectors themselves are in registry.h.
#pragma once

#include <memory>

#include "libruntime/select/plan.h"
#include "libruntime/select/selector.h"

namespace sqz {

// Whether a selector is stream, window or h2o: an index can be pruned for it.
bool is_static(SelectorKind selector);

// Every key. Sessions have one beside their own selector, for the layers that are read whole.
std::unique_ptr<Selector> make_dense_selector(const SelectableIndex& index);

}  // namespace sqz
