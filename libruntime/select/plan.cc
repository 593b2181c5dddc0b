#include "libruntime/select/plan.h"

#include <algorithm>
#include <cmath>

namespace sqz {
namespace {

using C = Calibration;

// In keys and values of 16 bits.
double units(const LayerView& view, int64_t bytes) {
  return static_cast<double>(bytes) /
         static_cast<double>((view.head_dim + view.value_dim) * dtype_size(view.dtype));
}

// The part of a key in a unit: 0.5 where values are as wide as keys.
double key_share(const LayerView& view) {
  return units(view, view.head_dim * dtype_size(view.dtype));
}

// The cost of a clustered key and its value: 1 with 16-bit rows.
double slot_units(const LayerView& view) {
  return view.coded_keys.bits > 0 ? units(view, view.slot_bytes()) : 1;
}

// The cost of the tree with `levels` in use. A centroid costs as much as a key. See
// docs/runtime.md, "How much is read".
ReadingCost cost_of_levels(std::span<const LayerView> layers, const Calibration& calibration,
                           int levels) {
  std::vector<double> clusters(static_cast<size_t>(levels));  // averaged over layers
  double sparse = 0, slot_cost = 0, value_means = 0, centroid = 0;
  double slots = 0, exact = 0;
  for (const LayerView& view : layers) {
    if (view.slots == 0) continue;
    ++sparse;
    slots = static_cast<double>(view.slots);
    exact = static_cast<double>(view.exact);
    slot_cost += slot_units(view);
    centroid += key_share(view);
    value_means += view.coded_keys.bits > 0 ? 1 - key_share(view) : 0;
    for (int k = 0; k < levels; ++k) {
      clusters[k] += static_cast<double>(view.level[view.levels - levels + k].clusters);
    }
  }
  for (double& count : clusters) count /= sparse;
  ReadingCost cost{.tokens = slots + exact,
                   .fixed = exact,
                   .per_keep = slots * (slot_cost / sparse),
                   .fixed_names = "centroids, sink and tail"};
  // The fraction of the keys that is alive at a level in use.
  const auto survive = [&](int k) -> double {
    if (k == 0) return 1;
    return calibration
        .coarse_keep[calibration.coarse_keep.size() - static_cast<size_t>(levels - k)];
  };
  for (int k = 0; k < levels; ++k) cost.fixed += centroid / sparse * survive(k) * clusters[k];
  // Rows of codes stand on those of their own clusters.
  cost.per_keep += value_means / sparse * clusters.back();
  return cost;
}

double budget_for(const ReadingCost& cost, double keep) {
  return (cost.fixed + keep * cost.per_keep) / cost.tokens;
}

// asked_keep and asked_budget of the plan, from whichever of keep and budget is given.
void resolve(const ReadingCost& cost, const SelectionRequest& request, SelectionPlan& plan) {
  plan.asked_keep = request.keep != 0 ? request.keep
                                      : (request.budget * cost.tokens - cost.fixed) / cost.per_keep;
  plan.asked_budget = request.keep != 0 ? budget_for(cost, request.keep) : request.budget;
}

// A place between two points of a calibrated table.
struct GridPoint {
  int64_t low = 0;
  double fraction = 0;  // of the way to low + 1
};

GridPoint grid_point(double keep) {
  const double at = std::clamp(keep, 0.0, 1.0) * static_cast<double>(C::kGrid - 1);
  const int64_t low = std::min(static_cast<int64_t>(at), C::kGrid - 2);
  return {low, at - static_cast<double>(low)};
}

}  // namespace

ReadingCost keys_cost(std::span<const LayerView> layers, int64_t exact_skipped) {
  ReadingCost cost{.fixed_names = exact_skipped > 0 ? "tail" : "sink and tail"};
  double sparse = 0;
  for (const LayerView& view : layers) {
    if (view.slots == 0) continue;
    ++sparse;
    const auto slots = static_cast<double>(view.slots);
    cost.tokens += slots + static_cast<double>(view.exact);
    cost.per_keep += slots * slot_units(view);
    cost.fixed += static_cast<double>(view.exact - exact_skipped);
    // Scattered keys of codes stand on the means of nearly every cluster.
    if (view.coded_keys.bits > 0) {
      cost.fixed += static_cast<double>(view.level[view.levels - 1].clusters);
    }
  }
  for (double* sum : {&cost.tokens, &cost.per_keep, &cost.fixed}) *sum /= sparse;
  return cost;
}

ReadingCost pages_cost(const SelectorInputs& inputs, const SelectionRequest&, SelectionPlan&) {
  const LayerView& view = *first_sparse(inputs.index.layers);
  // A page's two bounds cost as much as two keys.
  const auto slots = static_cast<double>(view.slots), page = static_cast<double>(view.page_size);
  return {.tokens = slots + static_cast<double>(view.exact),
          .fixed = static_cast<double>(view.exact) +
                   2 * key_share(view) * static_cast<double>(view.pages),
          .per_keep = slots,
          .least_keep = std::min(page / slots, 1.0),
          .fixed_names = "bounds, one page, sink and tail"};
}

ReadingCost tree_cost(const SelectorInputs& inputs, const SelectionRequest& request,
                      SelectionPlan& plan) {
  const Calibration& calibration = inputs.calibration;
  ReadingCost cost;
  const auto plan_levels = [&](int levels) {
    plan.levels = levels;
    cost = cost_of_levels(inputs.index.layers, calibration, levels);
    resolve(cost, request, plan);
  };
  plan_levels(plan.levels);
  if (plan.levels > 1 && plan.asked_keep > calibration.coarse_keep.back()) {
    plan_levels(1);
  }
  return cost;
}

Status settle(const ReadingCost& cost, const SelectionRequest& request, const std::string& path,
              SelectionPlan& plan) {
  resolve(cost, request, plan);
  const double least_budget = budget_for(cost, cost.least_keep);
  plan.least_budget = least_budget;
  if (plan.asked_keep >= 1 || plan.asked_budget >= 1 || least_budget >= 1) {
    plan = dense_plan(std::move(plan), true);
    return {};
  }
  // A budget that was meant to be the least one may miss it by a rounding.
  if (plan.asked_keep > 0 && plan.asked_keep >= cost.least_keep * (1 - 1e-9)) return {};
  if (cost.tokens < kShortContext) {
    plan = dense_plan(std::move(plan), true);
    return {};
  }
  if (request.keep != 0) {
    return invalid(
        concat(path, ": keep: found ", request.keep, ", expected at least ", cost.least_keep));
  }
  return invalid(concat(path, ": budget: found ", request.budget, ", expected ",
                        cost.least_keep > 0 ? "at least " : "more than ", least_budget,
                        ", the cost of ", cost.fixed_names));
}

Status check_amount(const SelectionRequest& r) {
  const int given = (r.budget != 0) + (r.keep != 0) + (r.thresholds != nullptr);
  if (given != 1) {
    return invalid(concat("found ", given, " of budget, keep and thresholds, expected one"));
  }
  for (const auto& [name, amount] : {std::pair("budget", r.budget), std::pair("keep", r.keep)}) {
    if (amount == 0 || (amount > 0 && amount <= 1)) continue;
    return invalid(concat(name, ": found ", amount, ", expected above 0 and at most 1"));
  }
  return {};
}

const LayerView* first_sparse(std::span<const LayerView> layers) {
  const auto at = std::find_if(layers.begin(), layers.end(),
                               [](const LayerView& view) { return view.slots > 0; });
  return at == layers.end() ? nullptr : &*at;
}

SelectionPlan dense_plan(SelectionPlan plan, bool fallback) {
  plan.dense = true;
  plan.fallback = fallback;
  plan.asked_budget = std::min(plan.asked_budget, 1.0);  // no centroids are read beside all keys
  plan.asked_keep = std::clamp(plan.asked_keep, 0.0, 1.0);
  return plan;
}

Status fill_explicit(const double* thresholds, SelectionPlan& plan) {
  std::vector<float> logs;
  for (int k = 0; k < plan.levels; ++k) {
    if (!(thresholds[k] >= 0) || thresholds[k] > 1) {
      return invalid(concat("thresholds[", k, "]: found ", thresholds[k], ", expected 0 to 1"));
    }
    logs.push_back(static_cast<float>(std::log(thresholds[k])));
  }
  plan.log_thresholds.assign(C::kScopes, logs);
  plan.asked_budget = plan.asked_keep = plan.least_budget = 0;
  return {};
}

float calibrated_threshold(const float* grid, double keep) {
  const GridPoint at = grid_point(keep);
  const float low = grid[at.low], high = grid[at.low + 1];
  if (at.fraction == 0) return low;
  if (at.fraction == 1) return high;
  if (low > 0 || !std::isfinite(low)) return high;  // log S is never above 0
  if (high < -1e30f) return low;
  return static_cast<float>(low + at.fraction * (high - low));
}

void fill_calibrated(const IndexMetadata& metadata, const Calibration& calibration, RuleKind rule,
                     SelectionPlan& plan) {
  const GridPoint at = grid_point(plan.asked_keep);
  const int64_t heads = metadata.model.layers * metadata.model.kv_heads;
  const int path = plan.levels > 1 ? 1 : 0;
  for (int scope = 0; scope < C::kScopes; ++scope) {
    std::vector<float>& logs = plan.log_thresholds.emplace_back();
    for (int k = 0; k + 1 < plan.levels; ++k) {
      const int level = metadata.levels - plan.levels + k;
      logs.push_back(
          calibration.coarse[static_cast<size_t>(scope * (metadata.levels - 1) + level)]);
    }
    const float* finest = calibration.thresholds.data() + (scope * C::kPaths + path) * C::kGrid;
    logs.push_back(calibrated_threshold(finest, plan.asked_keep));
    if (rule == RuleKind::kThreshold) continue;
    std::vector<float>& shares = plan.head_keep.emplace_back();
    for (int64_t i = 0; i < heads; ++i) {
      const float* grid = calibration.shares.data() + (scope * heads + i) * C::kGrid + at.low;
      shares.push_back(static_cast<float>(grid[0] + at.fraction * (grid[1] - grid[0])));
    }
  }
}

}  // namespace sqz
