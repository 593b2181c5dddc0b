#include "libindex/layer_budgets.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "libruntime/select/layer_spread.h"

namespace sqz {
namespace {

constexpr int kLast = kLayerGroups - 1;

// The sum of squared distances to the mean.
double spread(std::span<const double> values) {
  const double mean =
      std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  double sum = 0;
  for (const double value : values) sum += (value - mean) * (value - mean);
  return sum;
}

// Where the second and the third of the groups begin whose spreads have the least sum, in ascending
// values.
std::pair<size_t, size_t> best_split(std::span<const double> values) {
  std::pair<size_t, size_t> best;
  double least = std::numeric_limits<double>::infinity();
  for (size_t last = 2; last < values.size(); ++last) {
    const double rest = spread(values.subspan(last));
    for (size_t middle = 1; middle < last; ++middle) {
      const double sum =
          spread(values.first(middle)) + spread(values.subspan(middle, last - middle)) + rest;
      if (sum >= least) continue;
      least = sum;
      best = {middle, last};
    }
  }
  return best;
}

// `total` dealt to `layers` as evenly as whole keys allow, none above `most`; what is left over is
// returned.
int64_t deal_keys(int64_t total, int64_t most, std::span<const size_t> layers,
                  std::vector<int64_t>& budgets) {
  const int64_t n = std::ssize(layers);
  const int64_t dealt = std::min(total, n * most);
  for (int64_t i = 0; i < n; ++i) budgets[layers[i]] = dealt / n + (i < dealt % n ? 1 : 0);
  return total - dealt;
}

using Point = LayerLoss::Point;

// A piece of a layer's hull, on which each key gains the same.
struct Piece {
  size_t layer = 0;
  double keys = 0, gain = 0;  // in all; gain a key falls from piece to piece of a layer
  double slope() const { return gain / keys; }
};

// Ascending keys, falling and convex losses.
std::vector<Point> lower_hull(std::vector<Point> points) {
  std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) {
    return a.keys != b.keys ? a.keys < b.keys : a.loss < b.loss;
  });
  std::vector<Point> hull;
  for (const Point& point : points) {
    if (!hull.empty() && (point.keys == hull.back().keys || point.loss >= hull.back().loss)) {
      continue;  // more keys for nothing
    }
    while (hull.size() > 1) {
      const Point& a = hull[hull.size() - 2];
      const Point& b = hull.back();
      const double to_b = (a.loss - b.loss) * (point.keys - a.keys);
      const double to_point = (a.loss - point.loss) * (b.keys - a.keys);
      if (to_b > to_point) break;
      hull.pop_back();
    }
    hull.push_back(point);
  }
  return hull;
}

}  // namespace

Result<std::vector<int>> group_layers(std::span<const double> cosines) {
  std::vector<size_t> order(cosines.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return cosines[a] < cosines[b]; });
  std::vector<double> sorted;
  for (const size_t layer : order) sorted.push_back(cosines[layer]);
  int64_t different = 1;
  for (size_t i = 1; i < sorted.size(); ++i) different += sorted[i] != sorted[i - 1];
  if (different < kLayerGroups) {
    return Status(
        Code::kInvalidArgument,
        concat("cosines: found ", different, " different ", different == 1 ? "one" : "ones", " in ",
               cosines.size(), " layers, expected at least ", kLayerGroups,
               ": layers that are alike cannot be grouped; keep the uniform budget"));
  }
  const auto [middle, last] = best_split(sorted);
  std::vector<int> groups(cosines.size());
  for (size_t i = 0; i < order.size(); ++i) groups[order[i]] = (i >= middle) + (i >= last);
  return groups;
}

Result<std::vector<int64_t>> layer_budgets(std::span<const int> groups,
                                           const BudgetRequest& request) {
  const int64_t budget = request.budget;
  if (budget < 1 || budget > request.context) {
    return Status(Code::kInvalidArgument, concat("budget: found ", budget, ", expected 1 .. ",
                                                 request.context, " keys, what a layer has"));
  }
  const int64_t shrunk = std::llround(request.p * static_cast<double>(budget));
  if (shrunk < 1) {
    return Status(Code::kInvalidArgument,
                  concat("p: found ", request.p, ", expected one that leaves a layer of ", budget,
                         " keys at least one"));
  }
  std::vector<size_t> last, others;
  for (size_t i = 0; i < groups.size(); ++i) (groups[i] == kLast ? last : others).push_back(i);
  std::vector<int64_t> budgets(groups.size(), 0);
  const int64_t total = budget * std::ssize(groups), kept = shrunk * std::ssize(last);
  const int64_t back = deal_keys(total - kept, request.context, others, budgets);
  deal_keys(kept + back, request.context, last, budgets);
  return budgets;
}

std::vector<double> least_loss_keys(std::span<const LayerLoss> layers, double total) {
  std::vector<double> keys;
  std::vector<Piece> pieces;
  for (size_t l = 0; l < layers.size(); ++l) {
    const std::vector<Point> hull = lower_hull(layers[l].points);
    keys.push_back(hull.front().keys);
    for (size_t i = 1; i < hull.size(); ++i) {
      pieces.push_back({l, hull[i].keys - hull[i - 1].keys, hull[i - 1].loss - hull[i].loss});
    }
  }
  double left = total - std::accumulate(keys.begin(), keys.end(), 0.0);
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.slope() > b.slope(); });
  for (const Piece& piece : pieces) {
    const double taken = std::clamp(left, 0.0, piece.keys);
    keys[piece.layer] += taken;
    left -= taken;
  }
  if (left <= 0) return keys;
  std::vector<double> room;
  for (const double own : keys) room.push_back(1 - own);
  const std::vector<double> ones(keys.size(), 1.0);
  const std::vector<double> more = deal(left, ones, room);
  for (size_t l = 0; l < keys.size(); ++l) keys[l] += more[l];
  return keys;
}

std::vector<int64_t> scaled_budgets(std::span<const double> scales, const BudgetRequest& request) {
  const auto layers = std::ssize(scales);
  const double sum = std::accumulate(scales.begin(), scales.end(), 0.0);
  SelectionPlan plan;
  for (const double scale : scales) {
    plan.layer_keep.push_back(scale * static_cast<double>(layers) / sum);
  }
  // One key for each layer first.
  const int64_t more = request.context - 1;
  std::vector<int64_t> budgets(scales.size(), 1);
  if (more == 0) return budgets;
  plan.asked_keep = static_cast<double>(request.budget - 1) / static_cast<double>(more);
  const std::vector<int64_t> keys = layer_keys(plan, more);
  for (size_t l = 0; l < budgets.size(); ++l) budgets[l] += keys[l];
  return budgets;
}

}  // namespace sqz
