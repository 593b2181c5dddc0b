#include "libruntime/select/buckets.h"

#include <algorithm>
#include <cmath>

#include "libruntime/select/layer_spread.h"
#include "libruntime/select/runs.h"

namespace sqz {
namespace {

class BucketSelector final : public Selector {
 public:
  BucketSelector(const SelectableIndex& index, std::unique_ptr<BucketScorer> scorer,
                 std::unique_ptr<Rule> rule)
      : index_(index), scorer_(std::move(scorer)), rule_(std::move(rule)) {}

  bool before_rope() const override { return true; }

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const LayerView& view : index_.layers) {
      if (view.buckets == 0) continue;
      const auto buckets = static_cast<size_t>(view.buckets);
      const auto floats = static_cast<size_t>(scorer_->floats(view));
      limits.runs = std::max(limits.runs, static_cast<int64_t>((buckets + 1) / 2));
      limits.workspace.floats.resize(std::max(limits.workspace.floats.size(), floats));
      limits.workspace.scores.resize(std::max(limits.workspace.scores.size(), buckets));
      limits.workspace.order.resize(limits.workspace.scores.size());
      limits.workspace.bytes.resize(limits.workspace.scores.size());
    }
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& workspace,
                HeadSelection& out) const override {
    const LayerView& view = index_.layers[query.layer];
    const int64_t buckets = view.buckets;
    const std::span<float> scores = std::span(workspace.scores).first(buckets);
    scorer_->score(query, workspace.floats.data(), scores);
    const uint32_t* sizes =
        index_.tables[query.layer].bucket_sizes.data() + query.kv_head * buckets;
    for (int64_t i = 0; i < buckets; ++i) {
      if (sizes[i] == 0) {
        scores[i] = -INFINITY;
      } else if (std::isnan(scores[i]) || scores[i] == INFINITY) {
        return {Code::kNumeric, "the score of a bucket is NaN or infinite"};
      }
    }
    const std::span<uint8_t> chosen = std::span(workspace.bytes).first(buckets);
    rule_->choose({.layer = query.layer,
                   .kv_head = query.kv_head,
                   .scope = query.tokens > 1 ? 1 : 0,
                   .keys = view.slots,
                   .scores = scores,
                   .sizes = {sizes, static_cast<size_t>(buckets)}},
                  workspace.order, chosen);
    clear(out);
    const uint32_t* offsets = view.bucket_offsets + query.kv_head * (buckets + 1);
    for (int64_t i = 0; i < buckets; ++i) {
      if (chosen[i] != 0) append_run(out, offsets[i], offsets[i + 1]);
    }
    return {};
  }

 private:
  SelectableIndex index_;
  std::unique_ptr<BucketScorer> scorer_;
  std::unique_ptr<Rule> rule_;
};

}  // namespace

Result<PreparedSelector> prepare_buckets(const SelectorInputs& inputs,
                                         const SelectionRequest& request, const char* name,
                                         std::unique_ptr<BucketScorer> scorer) {
  SQZ_RETURN_IF_ERROR(check_amount(request));
  SQZ_RETURN_IF_ERROR(check_plain(request, name, false));
  if (request.group != 0) {
    return Status(
        Code::kInvalidArgument,
        concat("group: selector ", name, " adds up the scores of a group's heads: expected mean"));
  }
  const LayerView* view = first_sparse(inputs.index.layers);
  PreparedSelector out;
  if (view == nullptr) return PreparedSelector{nothing_sparse_plan(request), nullptr};
  if (inputs.metadata.partition != Partition::kBuckets) {
    return Status(
        Code::kUnsupported,
        bad_field(inputs.path, "partition", partition_name(inputs.metadata.partition),
                  concat("buckets: selector ", name, " needs an index built with --qmodel")));
  }
  const ReadingCost cost = keys_cost(*view);
  resolve(cost, request, out.plan);
  SQZ_RETURN_IF_ERROR(settle(cost, request, inputs.path, out.plan));
  if (out.plan.dense) return out;
  out.plan.layer_keep = inputs.layer_keep;
  const auto heads = static_cast<size_t>(inputs.metadata.model.layers * view->kv_heads);
  out.plan.head_keep.assign(Calibration::kScopes,
                            std::vector<float>(heads, static_cast<float>(out.plan.asked_keep)));
  spread_head_keep(inputs.metadata, out.plan);
  out.selector = std::make_unique<BucketSelector>(inputs.index, std::move(scorer),
                                                  make_planned_rule(out.plan, view->kv_heads));
  return out;
}

}  // namespace sqz
