#include "libindex/measured_budgets.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "libruntime/select/layer_spread.h"

namespace sqz {
namespace {

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

Status check(std::span<const LayerLoss> layers) {
  for (size_t l = 0; l < layers.size(); ++l) {
    if (layers[l].points.empty()) {
      return {Code::kInvalidArgument, concat("losses of layer ", l, ": found none")};
    }
    for (const Point& point : layers[l].points) {
      if (point.keys >= 0 && point.keys <= 1 && point.loss >= 0 && std::isfinite(point.loss)) {
        continue;
      }
      return {Code::kInvalidArgument, concat("losses of layer ", l, ": found ", point.loss, " at ",
                                             point.keys, " of the keys, expected both from 0")};
    }
  }
  return {};
}

}  // namespace

Result<std::vector<double>> least_loss_keys(std::span<const LayerLoss> layers, double total) {
  SQZ_RETURN_IF_ERROR(check(layers));
  std::vector<double> keys;
  std::vector<Piece> pieces;
  for (size_t l = 0; l < layers.size(); ++l) {
    const std::vector<Point> hull = lower_hull(layers[l].points);
    keys.push_back(hull.front().keys);
    for (size_t i = 1; i < hull.size(); ++i) {
      pieces.push_back({l, hull[i].keys - hull[i - 1].keys, hull[i - 1].loss - hull[i].loss});
    }
  }
  const double least = std::accumulate(keys.begin(), keys.end(), 0.0);
  double left = total - least;
  if (!(left >= -1e-9) || total > static_cast<double>(layers.size()) + 1e-9) {
    return Status(Code::kInvalidArgument,
                  concat("keys of all layers: found ", total, ", expected ", least, " to ",
                         layers.size(), " times those of a layer"));
  }
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

Result<std::vector<int64_t>> scaled_budgets(std::span<const double> scales,
                                            const BudgetRequest& request) {
  if (request.budget < 1 || request.budget > request.context) {
    return Status(Code::kInvalidArgument,
                  concat("budget: found ", request.budget, ", expected 1 .. ", request.context,
                         " keys, what a layer has"));
  }
  const auto layers = std::ssize(scales);
  const double sum = std::accumulate(scales.begin(), scales.end(), 0.0);
  SelectionPlan plan;
  for (size_t l = 0; l < scales.size(); ++l) {
    if (!(scales[l] > 0 && std::isfinite(scales[l]))) {
      return Status(Code::kInvalidArgument,
                    concat("scale of layer ", l, ": found ", scales[l], ", expected above 0"));
    }
    plan.layer_keep.push_back(scales[l] * static_cast<double>(layers) / sum);
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
