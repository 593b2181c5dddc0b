// The table of selectors, and how a request becomes a plan and a selector. A new selector is a row
// of the table in registry.cc, in the place of its value in sqz_selector.
#pragma once

#include <memory>

#include "libruntime/select/plan.h"
#include "libruntime/select/selector.h"

namespace sqz {

// `selector` is null if the plan is to read everything.
struct PreparedSelector {
  SelectionPlan plan;
  std::unique_ptr<Selector> selector;
};

// "squeezed": as tools and sqz_selector_name() spell it.
const char* selector_name(SelectorKind selector);
inline constexpr int kSelectorKinds = static_cast<int>(SelectorKind::kSaap) + 1;

// The selector that an index was built for; see SQZ_SELECTOR_AUTO.
SelectorKind fitting_selector(const IndexMetadata& metadata);

// kInvalidArgument for a request that makes no sense or a budget that cannot be met, kUnsupported
// for an index that lacks what the selector needs.
Result<PreparedSelector> prepare_selector(const SelectorInputs& inputs,
                                          const SelectionRequest& request);

}  // namespace sqz
