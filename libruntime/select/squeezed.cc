// The selector `squeezed`: clusters scored by equations 1 to 3 of Squeezed Attention, level by
// level from coarse to fine; the children of what a level keeps are the next level's clusters.
#include <algorithm>
#include <array>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/select/layer_spread.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/runs.h"
#include "libruntime/select/score.h"

namespace sqz {
namespace {

struct SqueezedOptions {
  int levels = 1;  // in use, the finest ones of the index
  Group group = Group::kMean;
  bool estimate = false;  // report clusters that are not read, for the residual
};

class SqueezedSelector final : public Selector {
 public:
  SqueezedSelector(const SelectableIndex& index, const SqueezedOptions& options,
                   std::unique_ptr<Rule> rule)
      : index_(index), options_(options), rule_(std::move(rule)) {}

  SelectorLimits limits() const override {
    SelectorLimits limits;
    int64_t most = 0, floats = 0;
    for (const LayerView& view : index_.layers) {
      int64_t estimated = 0;
      for (int k = first_level(view); k < view.levels; ++k) {
        const int64_t clusters = view.level[k].clusters;
        most = std::max(most, clusters);
        estimated += (clusters + 1) / 2;
        // score_workspace() does not grow from this many tokens on.
        for (const int64_t tokens : {int64_t{1}, kFewRows + 1}) {
          ScoreProblem problem = problem_of(view, k);
          problem.tokens = tokens;
          floats = std::max(floats, score_workspace(problem));
        }
      }
      if (view.levels == 0) continue;
      limits.runs = std::max(limits.runs, (view.level[view.levels - 1].clusters + 1) / 2);
      if (options_.estimate) limits.estimated = std::max(limits.estimated, estimated);
    }
    limits.workspace.floats.resize(static_cast<size_t>(floats));
    limits.workspace.scores.resize(static_cast<size_t>(most));
    limits.workspace.order.resize(static_cast<size_t>(most));
    limits.workspace.bytes.resize(static_cast<size_t>(3 * most));
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& workspace,
                HeadSelection& out) const override {
    const LayerView& view = index_.layers[query.layer];
    const size_t most = workspace.scores.size();
    uint8_t* alive = workspace.bytes.data();
    uint8_t* next = alive + most;
    uint8_t* chosen = next + most;
    clear(out);
    for (int k = first_level(view); k < view.levels; ++k) {
      const int64_t n = view.level[k].clusters;
      const bool first = k == first_level(view), finest = k + 1 == view.levels;
      ScoreProblem problem = problem_of(view, k);
      problem.centroids = static_cast<const std::byte*>(view.level[k].centroids) +
                          query.kv_head * n * view.head_dim * dtype_size(view.dtype);
      problem.sizes = index_.tables[query.layer].level[k].sizes.data() + query.kv_head * n;
      problem.alive = first ? nullptr : alive;
      problem.queries = query.queries;
      problem.tokens = query.tokens;
      problem.token_stride = query.token_stride;
      const std::span<float> scores = std::span(workspace.scores).first(n);
      SQZ_RETURN_IF_ERROR(score_clusters(problem, scores, workspace.floats));

      const Choice choice = {.layer = query.layer,
                             .kv_head = query.kv_head,
                             .scope = query.tokens > 1 ? 1 : 0,
                             .level = k - first_level(view),
                             .finest = finest,
                             .keys = view.slots,
                             .scores = scores,
                             .sizes = {problem.sizes, static_cast<size_t>(n)}};
      rule_->choose(choice, workspace.order, {chosen, static_cast<size_t>(n)});

      const uint32_t* offsets = view.level[k].offsets + query.kv_head * (n + 1);
      if (first) std::fill(alive, alive + n, uint8_t{1});
      out.centroids += std::count(alive, alive + n, 1);
      if (options_.estimate) add_estimates(k, n, alive, chosen, problem.sizes, out);
      if (finest) {
        for (int64_t i = 0; i < n; ++i) {
          if (chosen[i] != 0) append_run(out, offsets[i], offsets[i + 1]);
        }
      } else {
        std::fill(next, next + view.level[k + 1].clusters, uint8_t{0});
        for (int64_t i = 0; i < n; ++i) {
          if (chosen[i] != 0) std::fill(next + offsets[i], next + offsets[i + 1], uint8_t{1});
        }
        std::swap(alive, next);
      }
    }
    return {};
  }

 private:
  int first_level(const LayerView& view) const {
    return std::max(0, view.levels - options_.levels);
  }

  ScoreProblem problem_of(const LayerView& view, int level) const {
    ScoreProblem problem;
    problem.dtype = view.dtype;
    problem.dim = view.head_dim;
    problem.clusters = view.level[level].clusters;
    problem.group = index_.group;
    problem.scale = index_.scale;
    problem.policy = options_.group;
    problem.kernels = index_.kernels;
    return problem;
  }

  static void add_estimates(int level, int64_t n, const uint8_t* alive, const uint8_t* chosen,
                            const uint32_t* sizes, HeadSelection& out) {
    const auto estimated = [&](int64_t i) {
      return alive[i] != 0 && chosen[i] == 0 && sizes[i] != 0;
    };
    for (int64_t i = 0; i < n;) {
      if (!estimated(i)) {
        ++i;
        continue;
      }
      const int64_t first = i;
      while (i < n && estimated(i)) ++i;
      out.estimated[out.estimated_count++] = {static_cast<uint32_t>(level),
                                              static_cast<uint32_t>(first),
                                              static_cast<uint32_t>(i - first)};
      out.estimated_clusters += i - first;
    }
  }

  SelectableIndex index_;
  SqueezedOptions options_;
  std::unique_ptr<Rule> rule_;
};

}  // namespace

Result<PreparedSelector> prepare_squeezed(const SelectorInputs& inputs,
                                          const SelectionRequest& request) {
  PreparedSelector out;
  SQZ_ASSIGN_OR_RETURN(out.plan, plan_selection(inputs.metadata, inputs.index.layers,
                                                inputs.calibration, request, inputs.path));
  if (out.plan.dense) return out;
  out.plan.scales = inputs.scales;
  if (request.thresholds == nullptr) {
    std::array<const float*, Calibration::kScopes> curves;
    for (int scope = 0; scope < Calibration::kScopes; ++scope) {
      curves[scope] = threshold_curve(inputs.calibration, scope, out.plan.levels, request.group);
    }
    const double most = out.plan.levels > 1 ? inputs.calibration.coarse_keep.back() : 1.0;
    spread_thresholds(inputs.metadata, inputs.calibration.shares, curves, most, out.plan);
    spread_shares(inputs.metadata, out.plan);
  }
  const SqueezedOptions options = {.levels = out.plan.levels,
                                   .group = static_cast<Group>(request.group),
                                   .estimate = request.estimate};
  const int64_t kv_heads = inputs.metadata.model.kv_heads;
  out.selector = std::make_unique<SqueezedSelector>(
      inputs.index, options,
      request.rule == RuleKind::kBudget
          ? make_budget_rule(out.plan.log_thresholds, out.plan.shares, kv_heads)
          : make_threshold_rule(out.plan.log_thresholds, out.plan.layer_thresholds));
  return out;
}

}  // namespace sqz
