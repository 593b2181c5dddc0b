// The selector `saap`: buckets of keys, and a network that says from a query before RoPE how much
// attention a key of each bucket gets (SAAP, section 4; formats/qmodel_file.h). With the sizes of
// the buckets that makes shares of the attention, which are added up over the heads of the group
// and the tokens of the block. Buckets are read by share over size until the share of the keys that
// was asked for is full: what is found for each key that is read, as in equation 1 of Squeezed
// Attention with the network's logits in the place of products with centroids.
//
// The networks are the model's, not the context's: like its weights they are read once for a step,
// and do not count in the budget.
#include <algorithm>
#include <cmath>

#include "libruntime/select/classifier.h"
#include "libruntime/select/layer_spread.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/runs.h"

namespace sqz {
namespace {

class SaapSelector final : public Selector {
 public:
  SaapSelector(const SelectableIndex& index, std::unique_ptr<Rule> rule)
      : index_(index), rule_(std::move(rule)) {}

  bool before_rope() const override { return true; }

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const LayerView& view : index_.layers) {
      const auto buckets = static_cast<size_t>(view.buckets);
      const auto floats = static_cast<size_t>(
          classifier_floats(view.head_dim, view.classifier.hidden, view.buckets));
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
    score(query, workspace.floats.data(), scores);
    const uint32_t* sizes =
        index_.tables[query.layer].bucket_sizes.data() + query.kv_head * buckets;
    const float rows = static_cast<float>(query.tokens * index_.group);
    for (int64_t i = 0; i < buckets; ++i) {
      if (!std::isfinite(scores[i])) {
        return {Code::kNumeric, "the product of a query and the classifier is NaN or infinite"};
      }
      const auto size = static_cast<float>(sizes[i]);
      scores[i] = sizes[i] == 0 ? -INFINITY : std::log(scores[i] / rows) - std::log(size);
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
  // scores = shares of the attention, summed over the block's queries.
  void score(const SelectQuery& query, float* floats, std::span<float> scores) const {
    const LayerView& view = index_.layers[query.layer];
    const Classifier network = head_classifier(view, index_.tables[query.layer], query.kv_head);
    const float* rows[kClassifierRows];
    int64_t count = 0;
    std::fill(scores.begin(), scores.end(), 0.0f);
    for (int64_t t = 0; t < query.tokens; ++t) {
      for (int64_t head = 0; head < index_.group; ++head) {
        rows[count++] = query.queries + t * query.token_stride + head * view.head_dim;
        if (count < kClassifierRows) continue;
        add_bucket_shares(*index_.kernels, network, rows, count, floats, scores);
        count = 0;
      }
    }
    add_bucket_shares(*index_.kernels, network, rows, count, floats, scores);
  }

  SelectableIndex index_;
  std::unique_ptr<Rule> rule_;
};

}  // namespace

Result<PreparedSelector> prepare_saap(const SelectorInputs& inputs,
                                      const SelectionRequest& request) {
  SQZ_RETURN_IF_ERROR(check_amount(request));
  SQZ_RETURN_IF_ERROR(check_plain(request, "saap", false));
  if (request.group != 0) {
    return Status(Code::kInvalidArgument,
                  "group: selector saap adds up the shares of a group's heads: expected mean");
  }
  const LayerView* view = first_sparse(inputs.index.layers);
  PreparedSelector out;
  if (view == nullptr) return PreparedSelector{dense_plan(out.plan, true), nullptr};
  if (inputs.metadata.partition != Partition::kBuckets) {
    return Status(Code::kUnsupported,
                  bad_field(inputs.path, "partition", partition_name(inputs.metadata.partition),
                            "buckets: selector saap needs an index built with --qmodel"));
  }
  const ReadingCost cost = keys_cost(*view);
  resolve(cost, request, out.plan);
  SQZ_RETURN_IF_ERROR(settle(cost, request, inputs.path, out.plan));
  if (out.plan.dense) return out;
  out.plan.scales = inputs.scales;
  const auto heads = static_cast<size_t>(inputs.metadata.model.layers * view->kv_heads);
  out.plan.shares.assign(Calibration::kScopes,
                         std::vector<float>(heads, static_cast<float>(out.plan.asked_keep)));
  spread_shares(inputs.metadata, out.plan);
  out.selector = std::make_unique<SaapSelector>(
      inputs.index, make_budget_rule({}, out.plan.shares, view->kv_heads));
  return out;
}

}  // namespace sqz
