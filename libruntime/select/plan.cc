#include "libruntime/select/plan.h"

#include <algorithm>
#include <cmath>

namespace sqz {
namespace {

using C = Calibration;

constexpr double kAliveOfThresholds = 0.5;  // what they will read is not known

Status invalid(std::string message) {
  return {Code::kInvalidArgument, std::move(message)};
}

float coarse_of(const Calibration& c, int scope, int level, int index_levels) {
  return c.coarse[static_cast<size_t>(scope * (index_levels - 1) + level)];
}

// In keys and values of 16 bits.
double units(const LayerView& view, int64_t bytes) {
  return static_cast<double>(bytes) /
         static_cast<double>(2 * view.head_dim * dtype_size(view.dtype));
}

// Of the tree with `levels` in use, where codes of `alive` of the keys are read. A centroid or a
// value mean costs half a unit. See docs/runtime.md, "How much is read".
ReadingCost tree_cost(std::span<const LayerView> layers, const Calibration& calibration, int levels,
                      double alive) {
  std::vector<double> clusters(static_cast<size_t>(levels));  // averaged over layers
  double sparse = 0, slot_cost = 0, code_cost = 0, coded = 0;
  double slots = 0, exact = 0;
  for (const LayerView& view : layers) {
    if (view.slots == 0) continue;
    ++sparse;
    slots = static_cast<double>(view.slots);
    exact = static_cast<double>(view.exact);
    slot_cost += slot_units(view);
    if (view.key_codes.bits > 0) code_cost = units(view, view.key_code_bytes());
    coded += view.coded_keys.bits > 0 ? 1 : 0;
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
    if (k == 0 || k == levels) return k == 0 ? 1 : 0;
    return calibration
        .coarse_keep[calibration.coarse_keep.size() - static_cast<size_t>(levels - k)];
  };
  for (int k = 0; k < levels; ++k) {
    cost.fixed += 0.5 * survive(k) * clusters[k];
    // Approximated: what is alive at this level and not at the next; at the finest, what is not
    // kept.
    if (code_cost > 0) cost.fixed += 0.5 * (survive(k) - survive(k + 1)) * clusters[k];
  }
  cost.all_codes = code_cost * slots;
  cost.fixed += alive * cost.all_codes;
  // An approximation by codes stands on the mean values of all clusters, read or not.
  if (code_cost > 0 && alive > 0) return cost;
  if (code_cost > 0) cost.per_keep -= 0.5 * clusters.back();
  // Rows of codes stand on those of their own clusters.
  cost.per_keep += 0.5 * (coded / sparse) * clusters.back();
  return cost;
}

// The share of the keys that is worth looking at by its codes, if what sink, tail, centroids and
// means leave of the budget pays for the codes of all keys `times` over: most, but codes must not
// eat the budget. From measurements, docs/design.md.
double alive_share(double times) {
  return std::clamp(1 - std::exp(-times), 0.0, std::max(0.0, 0.6 * times));
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

}  // namespace

GridPoint grid_point(double keep) {
  const double at = std::clamp(keep, 0.0, 1.0) * static_cast<double>(C::kGrid - 1);
  const int64_t low = std::min(static_cast<int64_t>(at), C::kGrid - 2);
  return {low, at - static_cast<double>(low)};
}

const float* threshold_curve(const Calibration& c, int scope, int levels) {
  const int path = levels > 1 ? 1 : 0;
  return c.thresholds.data() + (scope * C::kPaths + path) * C::kGrid;
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
  if (r.thresholds != nullptr && !r.layer_scales.empty()) {
    return invalid("layer_scales take a budget or keep, found thresholds");
  }
  return {};
}

Status check_plain(const SelectionRequest& r, const char* selector, bool thresholds) {
  const auto refuse = [&](const char* option, const std::string& found, const char* expected) {
    return invalid(
        concat("selector ", selector, ": ", option, ": found ", found, ", expected ", expected));
  };
  if (r.levels != 0) return refuse("levels", concat(r.levels), "0: it has no centroids");
  if (r.thresholds != nullptr && !thresholds) {
    return refuse("thresholds", "some", "a budget or keep");
  }
  return {};
}

void fill_head_keep(const IndexMetadata& metadata, const std::vector<float>& table,
                    SelectionPlan& plan) {
  const GridPoint at = grid_point(plan.asked_keep);
  const int64_t heads = metadata.model.layers * metadata.model.kv_heads;
  for (int scope = 0; scope < C::kScopes; ++scope) {
    std::vector<float> shares;
    for (int64_t i = 0; i < heads; ++i) {
      const float* grid = table.data() + (scope * heads + i) * C::kGrid + at.low;
      shares.push_back(static_cast<float>(grid[0] + at.fraction * (grid[1] - grid[0])));
    }
    plan.head_keep.push_back(std::move(shares));
  }
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

std::unique_ptr<Rule> make_planned_rule(const SelectionPlan& plan, int64_t kv_heads) {
  if (plan.head_keep.empty()) {
    return make_threshold_rule(plan.log_thresholds, plan.layer_thresholds);
  }
  return make_budget_rule(plan.log_thresholds, plan.head_keep, kv_heads);
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

SelectionPlan nothing_sparse_plan(const SelectionRequest& request) {
  SelectionPlan plan;
  const double asked = request.budget + request.keep;  // one of them is given, or thresholds
  plan.asked_budget = plan.asked_keep = asked;
  return dense_plan(plan, true);
}

double slot_units(const LayerView& view) {
  return view.coded_keys.bits > 0 ? units(view, view.slot_bytes()) : 1;
}

ReadingCost keys_cost(const LayerView& view, int64_t exact_skipped) {
  // Scattered keys of codes stand on the means of nearly every cluster.
  const int64_t means =
      view.coded_keys.bits > 0 ? view.level[static_cast<size_t>(view.levels - 1)].clusters : 0;
  return {.tokens = static_cast<double>(view.slots + view.exact),
          .fixed = static_cast<double>(view.exact - exact_skipped + means),
          .per_keep = static_cast<double>(view.slots) * slot_units(view),
          .fixed_names = exact_skipped > 0 ? "tail" : "sink and tail"};
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

float calibrated_threshold(const float* grid, double keep) {
  const GridPoint at = grid_point(keep);
  const float low = grid[at.low], high = grid[at.low + 1];
  if (at.fraction == 0) return low;
  if (at.fraction == 1) return high;
  if (low > 0 || !std::isfinite(low)) return high;  // log S is never above 0
  if (high < -1e30f) return low;
  return static_cast<float>(low + at.fraction * (high - low));
}

Result<SelectionPlan> plan_selection(const IndexMetadata& metadata,
                                     std::span<const LayerView> layers,
                                     const Calibration& calibration,
                                     const SelectionRequest& request, const std::string& path) {
  SQZ_RETURN_IF_ERROR(check_amount(request));
  if (metadata.partition != Partition::kKmeans) {
    return Status(Code::kUnsupported,
                  bad_field(path, "partition", partition_name(metadata.partition),
                            "kmeans: selector squeezed needs an index with clusters"));
  }
  if (request.levels < 0 || request.levels > metadata.levels) {
    return invalid(concat("levels: found ", request.levels, ", expected 0 to ", metadata.levels,
                          ", what the index has"));
  }
  SelectionPlan plan;
  if (metadata.levels == 0) return nothing_sparse_plan(request);
  plan.levels = request.levels == 0 ? metadata.levels : request.levels;
  const bool codes = metadata.key_codes > 0;
  if (request.thresholds != nullptr) {
    SQZ_RETURN_IF_ERROR(fill_explicit(request.thresholds, plan));
    if (codes) plan.alive = kAliveOfThresholds;
    return plan;
  }

  // The tree serves budgets below what its coarse levels let through; above, the finest level
  // alone.
  ReadingCost cost;
  const auto plan_levels = [&](int levels) {
    plan.levels = levels;
    // Of a keep, the budget depends on the codes that it pays for: 32 steps settle both.
    for (int i = 0; i < (codes ? 32 : 1); ++i) {
      cost = tree_cost(layers, calibration, levels, plan.alive);
      resolve(cost, request, plan);
      if (cost.all_codes == 0) continue;
      const double rest = plan.asked_budget * cost.tokens - cost.fixed;
      plan.alive = alive_share(plan.alive + rest / cost.all_codes);
    }
  };
  plan_levels(plan.levels);
  if (plan.levels > 1 && std::max(plan.asked_keep, plan.alive) > calibration.coarse_keep.back()) {
    plan_levels(1);
  }
  SQZ_RETURN_IF_ERROR(settle(cost, request, path, plan));
  if (plan.dense) return plan;

  for (int scope = 0; scope < C::kScopes; ++scope) {
    std::vector<float> logs;
    for (int k = 0; k + 1 < plan.levels; ++k) {
      const int level = metadata.levels - plan.levels + k;
      logs.push_back(coarse_of(calibration, scope, level, metadata.levels));
    }
    logs.push_back(
        calibrated_threshold(threshold_curve(calibration, scope, plan.levels), plan.asked_keep));
    plan.log_thresholds.push_back(std::move(logs));
  }
  if (request.rule == RuleKind::kBudget) fill_head_keep(metadata, calibration.shares, plan);
  return plan;
}

}  // namespace sqz
