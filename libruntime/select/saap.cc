// The selectors of whole buckets (partition `buckets`), by a score: the best are read until the
// share of the keys that was asked for is full. What is read to score them is the model's, like its
// weights: it does not count in the budget.
#include <algorithm>
#include <cmath>

#include "libruntime/select/classifier.h"
#include "libruntime/select/layer_spread.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/runs.h"

namespace sqz {
namespace {

struct BucketScorer {
  const char* name;  // the selector's, for messages
  // Workspace of score(), of a layer with buckets.
  int64_t (*floats)(const LayerView& view);
  // One score for each of the layer's buckets, from queries before RoPE; what is told of empty ones
  // does not matter. Allocation-free.
  void (*score)(const SelectableIndex& index, const SelectQuery& query, float* floats,
                std::span<float> scores);
};

class BucketSelector final : public Selector {
 public:
  BucketSelector(const SelectableIndex& index, const BucketScorer& scorer,
                 std::unique_ptr<Rule> rule)
      : index_(index), scorer_(scorer), rule_(std::move(rule)) {}

  bool before_rope() const override { return true; }

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const LayerView& view : index_.layers) {
      if (view.buckets == 0) continue;
      limits.choose_among(view.buckets);
      limits.use_floats(scorer_.floats(view));
    }
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& workspace,
                HeadSelection& out) const override {
    const LayerView& view = index_.layers[query.layer];
    const int64_t buckets = view.buckets;
    const std::span<float> scores = std::span(workspace.scores).first(buckets);
    scorer_.score(index_, query, workspace.floats.data(), scores);
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
  BucketScorer scorer_;
  std::unique_ptr<Rule> rule_;
};

// kNumeric at select() for a score that is NaN or +infinity.
Result<PreparedSelector> prepare_buckets(const SelectorInputs& inputs,
                                         const SelectionRequest& request,
                                         const BucketScorer& scorer) {
  SQZ_RETURN_IF_ERROR(check_amount(request));
  SQZ_RETURN_IF_ERROR(check_plain(request, scorer.name, false));
  if (request.group != GroupPolicy::kMean) {
    return Status(Code::kInvalidArgument,
                  concat("group: selector ", scorer.name,
                         " adds up the scores of a group's heads: expected mean"));
  }
  const LayerView* view = first_sparse(inputs.index.layers);
  PreparedSelector out;
  if (view == nullptr) return PreparedSelector{nothing_sparse_plan(request), nullptr};
  if (inputs.metadata.partition != Partition::kBuckets) {
    return Status(Code::kUnsupported,
                  bad_field(inputs.path, "partition", partition_name(inputs.metadata.partition),
                            concat("buckets: selector ", scorer.name,
                                   " needs an index built with --qmodel")));
  }
  const ReadingCost cost = keys_cost(*view);
  SQZ_RETURN_IF_ERROR(settle(cost, request, inputs.path, out.plan));
  if (out.plan.dense) return out;
  out.plan.layer_keep = inputs.layer_keep;
  const auto heads = static_cast<size_t>(inputs.metadata.model.layers * view->kv_heads);
  out.plan.head_keep.assign(Calibration::kScopes,
                            std::vector<float>(heads, static_cast<float>(out.plan.asked_keep)));
  spread_head_keep(inputs.metadata, out.plan);
  out.selector = std::make_unique<BucketSelector>(inputs.index, scorer,
                                                  make_planned_rule(out.plan, view->kv_heads));
  return out;
}

int64_t centroids_floats(const LayerView& view) {
  return view.head_dim;
}

void score_by_centroids(const SelectableIndex& index, const SelectQuery& query, float* floats,
                        std::span<float> scores) {
  const LayerView& view = index.layers[query.layer];
  const int64_t dim = view.head_dim;
  std::fill_n(floats, dim, 0.0f);  // the sum of the queries
  for (int64_t t = 0; t < query.tokens; ++t) {
    const float* rows = query.queries + t * query.token_stride;
    for (int64_t i = 0; i < index.group * dim; ++i) floats[i % dim] += rows[i];
  }
  const float* centroids =
      view.classifier.centroids + query.kv_head * static_cast<int64_t>(scores.size()) * dim;
  for (size_t c = 0; c < scores.size(); ++c, centroids += dim) {
    scores[c] = 0;
    for (int64_t i = 0; i < dim; ++i) scores[c] += floats[i] * centroids[i];
  }
}

int64_t network_floats(const LayerView& view) {
  return classifier_floats(view.head_dim, view.classifier.hidden, view.buckets);
}

// scores = shares of the attention, summed over the block's queries.
void add_shares(const SelectableIndex& index, const SelectQuery& query, float* floats,
                std::span<float> scores) {
  const LayerView& view = index.layers[query.layer];
  const Classifier network = head_classifier(view, index.tables[query.layer], query.kv_head);
  const float* rows[kClassifierRows];
  int64_t count = 0;
  std::fill(scores.begin(), scores.end(), 0.0f);
  for (int64_t t = 0; t < query.tokens; ++t) {
    for (int64_t head = 0; head < index.group; ++head) {
      rows[count++] = query.queries + t * query.token_stride + head * view.head_dim;
      if (count < kClassifierRows) continue;
      add_bucket_shares(*index.kernels, network, rows, count, floats, scores);
      count = 0;
    }
  }
  add_bucket_shares(*index.kernels, network, rows, count, floats, scores);
}

void score_by_network(const SelectableIndex& index, const SelectQuery& query, float* floats,
                      std::span<float> scores) {
  add_shares(index, query, floats, scores);
  const uint32_t* sizes = index.tables[query.layer].bucket_sizes.data() +
                          query.kv_head * static_cast<int64_t>(scores.size());
  const float rows = static_cast<float>(query.tokens * index.group);
  for (size_t i = 0; i < scores.size(); ++i) {
    scores[i] = std::log(scores[i] / rows) - std::log(static_cast<float>(sizes[i]));
  }
}

}  // namespace

// SAAP, section 4: a network says from a query before RoPE how much attention a key of each bucket
// gets (formats/qmodel_file.h). With the sizes of the buckets that makes shares of the attention,
// which are added up over the heads of the group and the tokens of the block. Buckets are read by
// share over size: what is found for each key that is read, as in equation 1 of Squeezed Attention
// with the network's logits in the place of products with centroids.
Result<PreparedSelector> prepare_saap(const SelectorInputs& inputs,
                                      const SelectionRequest& request) {
  return prepare_buckets(inputs, request, {"saap", network_floats, score_by_network});
}

// What SAAP's paper compares its classifier with (section 6.1): buckets are read by the product of
// the query before RoPE and the bucket's centroid, summed over the heads of the group and the
// tokens of the block, whatever the buckets' sizes.
Result<PreparedSelector> prepare_kmeans(const SelectorInputs& inputs,
                                        const SelectionRequest& request) {
  return prepare_buckets(inputs, request, {"kmeans", centroids_floats, score_by_centroids});
}

}  // namespace sqz
