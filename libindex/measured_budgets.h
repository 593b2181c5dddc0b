// Layer budgets by what was measured: each layer's own loss as a function of the keys that it
// reads, and the keys dealt so that the sum of the losses is least.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "libindex/layer_budgets.h"

namespace sqz {

// What a layer costs with so many keys; points in any order.
struct LayerLoss {
  struct Point {
    double keys = 0;  // fraction of the clustered keys, in [0, 1]
    double loss = 0;  // >= 0, in any unit that is the same for all layers
  };
  std::vector<Point> points;
};

// Keys of each layer, [layers], that make the sum of the losses least at `total` keys in all.
// Losses are taken as piecewise linear on the lower convex hull of their points, no layer below its
// least point and none above 1; greedy on the marginal gain, which is optimal on convex losses.
// Keys beyond every point, which gain nothing, go to all layers alike. kInvalidArgument if a layer
// has no point, a number is out of range, or the total is below the sum of the least points; the
// message names it.
Result<std::vector<double>> least_loss_keys(std::span<const LayerLoss> layers, double total);

// Whole keys in proportion to `scales` [layers], each above 0: 1 .. context, their sum layers *
// budget exactly. `request.p` is not used.
Result<std::vector<int64_t>> scaled_budgets(std::span<const double> scales,
                                            const BudgetRequest& request);

}  // namespace sqz
