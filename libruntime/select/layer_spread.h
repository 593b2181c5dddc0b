// How a session's budget is spread over the layers: a layer's scale says how many times the average
// share of its clustered keys it keeps (SqueezeAttention's second dimension). Scales come from the
// session's options, or from the index if it embeds layer budgets; they apply to every selector.
//
// All layers pay the same before their first key (sinks, recent window, centroids, page bounds), so
// a scale applies to the clustered keys alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "libruntime/select/plan.h"

namespace sqz {

// [layers]: 0 where a layer is read whole, else its scale; the mean of these is 1. `dense_layers`
// first ones are read whole, as are those of scale infinity. kInvalidArgument for a number of
// scales that is not that of the layers, and for a scale that is not above 0; the message names the
// layer.
Result<std::vector<double>> layer_scales(const IndexMetadata& metadata,
                                         std::span<const LayerView> layers,
                                         const SelectionRequest& request, int dense_layers);

// Of `total`, to each in proportion to its weight, but none above its cap: what one cannot take
// goes to the others. Less than `total` in all if the caps are. A weight of 0 gets nothing.
std::vector<double> deal(double total, std::span<const double> weights,
                         std::span<const double> caps);

// Whole keys a KV head of each layer: those that asked_keep of `slots` pays on average, spread by
// the plan's layer_keep, at most all; their sum is exact. 0 for layers that are read whole.
std::vector<int64_t> layer_keys(const SelectionPlan& plan, int64_t slots);

// Spreads head_keep of the plan by layer_keep, with the same total.
void spread_head_keep(const IndexMetadata& metadata, SelectionPlan& plan);

}  // namespace sqz
