// The selector `saap` (SAAP, section 4): a network says from a query before RoPE how much attention
// a key of each bucket gets (formats/qmodel_file.h). With the sizes of the buckets that makes
// shares of the attention, which are added up over the heads of the group and the tokens of the
// block. Buckets are read best first, by share over size, until the share of the keys that was
// asked for is full: so equation 1 of Squeezed Attention, with the network's logits in place of
// products with centroids. The network is part of the model: it does not count in the budget.
#include <algorithm>
#include <cmath>

#include "libruntime/select/classifier.h"
#include "libruntime/select/layer_spread.h"
#include "libruntime/select/registry.h"

namespace sqz {
namespace {

class BucketSelector final : public Selector {
 public:
  BucketSelector(const SelectableIndex& index, std::unique_ptr<Rule> rule)
      : index_(index), rule_(std::move(rule)) {}

  bool before_rope() const override { return true; }

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const LayerView& view : index_.layers) {
      if (view.buckets == 0) continue;
      limits.choose_among(view.buckets);
      limits.use_floats(classifier_floats(view.head_dim, view.classifier.hidden, view.buckets));
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
    out.clear();
    const uint32_t* offsets = view.bucket_offsets + query.kv_head * (buckets + 1);
    for (int64_t i = 0; i < buckets; ++i) {
      if (chosen[i] != 0) out.read.append({offsets[i], offsets[i + 1] - offsets[i]});
    }
    return {};
  }

 private:
  // Shares of the attention over sizes, as means over the block's queries. Empty buckets get
  // anything.
  void score(const SelectQuery& query, float* floats, std::span<float> scores) const {
    const LayerView& view = index_.layers[query.layer];
    const LayerTable& table = index_.tables[query.layer];
    const Classifier network = head_classifier(view, table, query.kv_head);
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
    const uint32_t* sizes = table.bucket_sizes.data() + query.kv_head * view.buckets;
    const float queries = static_cast<float>(query.tokens * index_.group);
    for (size_t i = 0; i < scores.size(); ++i) {
      scores[i] = std::log(scores[i] / queries) - std::log(static_cast<float>(sizes[i]));
    }
  }

  SelectableIndex index_;
  std::unique_ptr<Rule> rule_;
};

}  // namespace

Result<PreparedSelector> prepare_saap(const SelectorInputs& inputs,
                                      const SelectionRequest& request) {
  SQZ_RETURN_IF_ERROR(check_amount(request));
  SQZ_RETURN_IF_ERROR(check_plain(request, "saap", false));
  const LayerView* view = first_sparse(inputs.index.layers);
  PreparedSelector out;
  if (view == nullptr) return PreparedSelector{nothing_sparse_plan(request), nullptr};
  if (inputs.metadata.partition != Partition::kBuckets) {
    return Status(Code::kUnsupported,
                  bad_field(inputs.path, "partition", partition_name(inputs.metadata.partition),
                            "buckets: selector saap needs an index built with --qmodel"));
  }
  const ReadingCost cost = keys_cost(*view);
  SQZ_RETURN_IF_ERROR(settle(cost, request, inputs.path, out.plan));
  if (out.plan.dense) return out;
  out.plan.layer_keep = inputs.layer_keep;
  const auto heads = static_cast<size_t>(inputs.metadata.model.layers * view->kv_heads);
  out.plan.head_keep.assign(Calibration::kScopes,
                            std::vector<float>(heads, static_cast<float>(out.plan.asked_keep)));
  spread_head_keep(inputs.metadata, out.plan);
  out.selector =
      std::make_unique<BucketSelector>(inputs.index, make_planned_rule(out.plan, view->kv_heads));
  return out;
}

}  // namespace sqz
