// The selector `ideal` (Squeezed Attention, appendix E): every key is scored by its own attention
// weight, as if it were a cluster of one, and the rule keeps the best, for each token by itself. It
// reads all keys to find them, which is not counted: it bounds what a selector can reach with the
// keys that it keeps.
#include <algorithm>
#include <array>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/select/layer_spread.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/score.h"

namespace sqz {
namespace {

class IdealSelector final : public Selector {
 public:
  IdealSelector(const SelectableIndex& index, std::unique_ptr<Rule> rule)
      : index_(index), rule_(std::move(rule)) {
    int64_t most = 0;
    for (const LayerView& view : index_.layers) most = std::max(most, view.slots);
    ones_.assign(static_cast<size_t>(most), 1u);
  }

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const LayerView& view : index_.layers) {
      if (view.slots == 0) continue;
      limits.choose_among(view.slots);
      limits.use_floats(most_score_workspace(problem_of(view)));
      if (view.coded_keys.bits > 0) {
        limits.workspace.products.emplace(*index_.kernels, view.head_dim);
      }
    }
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& workspace,
                HeadSelection& out) const override {
    const LayerView& view = index_.layers[query.layer];
    ScoreProblem problem = problem_of(view);
    const CodedHead codes = coded_head(view, view.coded_keys, false, query.kv_head);
    if (codes.coded()) {
      problem.coded = &codes;
      problem.products = &*workspace.products;
    } else {
      problem.centroids = static_cast<const std::byte*>(view.keys) +
                          query.kv_head * view.slots * view.head_dim * dtype_size(view.dtype);
    }
    problem.queries = query.queries;
    problem.tokens = query.tokens;
    problem.token_stride = query.token_stride;
    const std::span<float> scores = std::span(workspace.scores).first(view.slots);
    SQZ_RETURN_IF_ERROR(score_clusters(problem, scores, workspace.floats));
    const std::span<uint8_t> chosen = std::span(workspace.bytes).first(view.slots);
    rule_->choose({.layer = query.layer,
                   .kv_head = query.kv_head,
                   .scope = 0,
                   .keys = view.slots,
                   .scores = scores,
                   .sizes = std::span(ones_).first(view.slots)},
                  workspace.order, chosen);
    out.clear();
    for (uint32_t slot = 0; slot < view.slots; ++slot) {
      if (chosen[slot] != 0) out.read.append({slot, 1});
    }
    return {};
  }

 private:
  ScoreProblem problem_of(const LayerView& view) const {
    ScoreProblem problem;
    problem.dtype = view.dtype;
    problem.dim = view.head_dim;
    problem.clusters = view.slots;
    problem.sizes = ones_.data();
    problem.group = index_.group;
    problem.scale = index_.scale;
    problem.kernels = index_.kernels;
    return problem;
  }

  SelectableIndex index_;
  std::unique_ptr<Rule> rule_;
  std::vector<uint32_t> ones_;  // [M]
};

Status check_index(const SelectorInputs& inputs, bool calibrated) {
  const IndexMetadata& metadata = inputs.metadata;
  if (metadata.key_calibration || !calibrated) return {};
  return {Code::kUnsupported,
          bad_field(inputs.path, "calibration of single keys", "none",
                    "one: selector ideal needs an index built with --calibrate-keys")};
}

}  // namespace

Result<PreparedSelector> prepare_ideal(const SelectorInputs& inputs,
                                       const SelectionRequest& request) {
  SQZ_RETURN_IF_ERROR(check_amount(request));
  SQZ_RETURN_IF_ERROR(check_plain(request, "ideal", true));
  const LayerView* view = first_sparse(inputs.index.layers);
  PreparedSelector out;
  if (view == nullptr) return PreparedSelector{nothing_sparse_plan(request), nullptr};
  SQZ_RETURN_IF_ERROR(check_index(inputs, request.thresholds == nullptr));
  SelectionPlan& plan = out.plan;
  plan.levels = 1;
  plan.block = 1;
  if (request.thresholds != nullptr) {
    SQZ_RETURN_IF_ERROR(fill_explicit(request.thresholds, plan));
  } else {
    const ReadingCost cost = keys_cost(*view);
    SQZ_RETURN_IF_ERROR(settle(cost, request, inputs.path, plan));
    if (plan.dense) return out;
    for (int scope = 0; scope < Calibration::kScopes; ++scope) {
      const float* grid = inputs.calibration.key_thresholds.data() + scope * Calibration::kGrid;
      plan.log_thresholds.push_back({calibrated_threshold(grid, plan.asked_keep)});
    }
  }
  plan.layer_keep = inputs.layer_keep;
  if (request.thresholds == nullptr) {
    const float* grid = inputs.calibration.key_thresholds.data();
    const std::array curves = {grid, grid + Calibration::kGrid};
    spread_thresholds(inputs.metadata, inputs.calibration.key_shares, curves, 1.0, plan);
  }
  if (request.rule == RuleKind::kBudget && request.thresholds == nullptr) {
    fill_head_keep(inputs.metadata, inputs.calibration.key_shares, plan);
    spread_head_keep(inputs.metadata, plan);
  }
  out.selector = std::make_unique<IdealSelector>(
      inputs.index, make_planned_rule(plan, inputs.metadata.model.kv_heads));
  return out;
}

}  // namespace sqz
