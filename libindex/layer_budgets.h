// Layer budgets of SqueezeAttention (Algorithm 1): layers that hardly change their input get fewer
// keys, and what they give up goes to the others.
//
// The measure of a layer is the cosine between the hidden state before its input norm and the one
// after the attention's residual add, averaged over tokens: near 1, attention added little.
//
// And budgets by what was measured: each layer's own loss as a function of the keys that it reads,
// and the keys dealt so that the sum of the losses is least.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/base/status.h"

namespace sqz {

inline constexpr int kLayerGroups = 3;

// Groups by 1-D k-means of the cosines, solved exactly: group 0 has the lowest cosines, group 2
// (the paper's G3) the highest. Of equally good splits the one whose lower groups are smaller.
// `cosines`: [layers], in [-1, 1]. kInvalidArgument if fewer than three different ones leave a
// group empty.
Result<std::vector<int>> group_layers(std::span<const double> cosines);

struct BudgetRequest {
  int64_t budget = 0;   // keys of each layer if all had the same (b_init), 1 .. context
  int64_t context = 0;  // keys that a layer has at most: no budget exceeds it
  double p = 1;         // share of b_init that layers of the last group keep, in (0, 1]
};

// Keys of each layer, [layers]: round(p b_init) in the last group, the others share the rest alike.
// Keys beyond the length of the context go back to the last group. The sum is layers * b_init, to
// the key; keys that do not divide evenly go to the first layers. `groups` as of group_layers().
// kInvalidArgument if the budget is not in 1 .. context, or p leaves a layer no key.
Result<std::vector<int64_t>> layer_budgets(std::span<const int> groups,
                                           const BudgetRequest& request);

// The loss of a layer as a function of its keys; points in any order.
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
// Keys beyond every point, which gain nothing, go to all layers alike. Every layer has a point, and
// `total` is from the sum of the least points to the number of layers.
std::vector<double> least_loss_keys(std::span<const LayerLoss> layers, double total);

// Whole keys in proportion to `scales` [layers], each above 0: 1 .. context, their sum layers *
// budget exactly. `request.p` is not used, its budget is in 1 .. context.
std::vector<int64_t> scaled_budgets(std::span<const double> scales, const BudgetRequest& request);

}  // namespace sqz
