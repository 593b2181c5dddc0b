// The selector `squeezed`: clusters scored by equations 1 to 3 of Squeezed Attention, level by
// level from coarse to fine; the children of what a level keeps are the next level's clusters.
#include <algorithm>
#include <array>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/select/descend.h"
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
    limits.workspace.sizes.resize(static_cast<size_t>(2 * most));
    limits.workspace.ranges.resize(static_cast<size_t>(2 * most));
    limits.workspace.bytes.resize(static_cast<size_t>(most));
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& workspace,
                HeadSelection& out) const override {
    const LayerView& view = index_.layers[query.layer];
    const int first = first_level(view);
    const size_t most = workspace.scores.size();
    const auto half = [&](auto& all, int k) { return std::span(all).subspan(k % 2 * most, most); };
    const ClusterRange all = {0, static_cast<uint32_t>(view.level[first].clusters)};
    AliveClusters alive = {{&all, 1}, {sizes_of(query, first), all.count}};
    clear(out);
    for (int k = first; k < view.levels; ++k) {
      const size_t n = alive.sizes.size();
      const std::span<float> scores = std::span(workspace.scores).first(n);
      const std::span<uint8_t> chosen = std::span(workspace.bytes).first(n);
      SQZ_RETURN_IF_ERROR(
          score_clusters(problem_of(query, k, alive), scores, std::span(workspace.floats)));
      const bool finest = k + 1 == view.levels;
      const Choice choice = {.layer = query.layer,
                             .kv_head = query.kv_head,
                             .scope = query.tokens > 1 ? 1 : 0,
                             .level = k - first,
                             .finest = finest,
                             .keys = view.slots,
                             .scores = scores,
                             .sizes = alive.sizes};
      rule_->choose(choice, workspace.order, chosen);
      out.centroids += static_cast<int64_t>(n);
      if (options_.estimate) add_estimates(k, alive, chosen, out);

      const uint32_t* offsets =
          view.level[k].offsets + query.kv_head * (view.level[k].clusters + 1);
      if (finest) {
        for_each_chosen(alive.ranges, chosen, [&](size_t, uint32_t cluster) {
          append_run(out, offsets[cluster], offsets[cluster + 1]);
        });
      } else {
        alive = children_of_chosen(alive.ranges, chosen, offsets, sizes_of(query, k + 1),
                                   half(workspace.ranges, k), half(workspace.sizes, k));
      }
    }
    return {};
  }

 private:
  int first_level(const LayerView& view) const {
    return std::max(0, view.levels - options_.levels);
  }

  // Its shape alone.
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

  ScoreProblem problem_of(const SelectQuery& query, int level, const AliveClusters& alive) const {
    const LayerView& view = index_.layers[query.layer];
    ScoreProblem problem = problem_of(view, level);
    problem.centroids = static_cast<const std::byte*>(view.level[level].centroids) +
                        query.kv_head * problem.clusters * view.head_dim * dtype_size(view.dtype);
    problem.clusters = std::ssize(alive.sizes);
    problem.ranges = alive.ranges;
    problem.sizes = alive.sizes.data();
    problem.queries = query.queries;
    problem.tokens = query.tokens;
    problem.token_stride = query.token_stride;
    return problem;
  }

  // Keys of every cluster of a level, dead or alive.
  const uint32_t* sizes_of(const SelectQuery& query, int level) const {
    return index_.tables[query.layer].level[level].sizes.data() +
           query.kv_head * index_.layers[query.layer].level[level].clusters;
  }

  static void add_estimates(int level, const AliveClusters& alive, std::span<const uint8_t> chosen,
                            HeadSelection& out) {
    size_t i = 0;
    for (const ClusterRange& range : alive.ranges) {
      const uint32_t end = range.first + range.count;
      for (uint32_t cluster = range.first; cluster < end; ++cluster, ++i) {
        if (chosen[i] != 0 || alive.sizes[i] == 0) continue;
        ++out.estimated_clusters;
        ClusterRun* last =
            out.estimated_count > 0 ? &out.estimated[out.estimated_count - 1] : nullptr;
        if (last != nullptr && last->level == static_cast<uint32_t>(level) &&
            last->first + last->length == cluster) {
          ++last->length;
        } else {
          out.estimated[out.estimated_count++] = {static_cast<uint32_t>(level), cluster, 1};
        }
      }
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
  out.plan.layer_keep = inputs.layer_keep;
  if (request.thresholds == nullptr) {
    std::array<const float*, Calibration::kScopes> curves;
    for (int scope = 0; scope < Calibration::kScopes; ++scope) {
      curves[scope] = threshold_curve(inputs.calibration, scope, out.plan.levels, request.group);
    }
    const double most = out.plan.levels > 1 ? inputs.calibration.coarse_keep.back() : 1.0;
    spread_thresholds(inputs.metadata, inputs.calibration.shares, curves, most, out.plan);
    spread_head_keep(inputs.metadata, out.plan);
  }
  const SqueezedOptions options = {.levels = out.plan.levels,
                                   .group = static_cast<Group>(request.group),
                                   .estimate = request.estimate};
  const int64_t kv_heads = inputs.metadata.model.kv_heads;
  out.selector = std::make_unique<SqueezedSelector>(
      inputs.index, options,
      request.rule == RuleKind::kBudget
          ? make_budget_rule(out.plan.log_thresholds, out.plan.head_keep, kv_heads)
          : make_threshold_rule(out.plan.log_thresholds, out.plan.layer_thresholds));
  return out;
}

}  // namespace sqz
