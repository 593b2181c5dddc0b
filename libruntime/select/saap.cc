// The selector `saap`: buckets of keys, and a network that says from a query before RoPE how much
// attention a key of each bucket gets (SAAP, section 4; formats/qmodel_file.h). With the sizes of
// the buckets that makes shares of the attention, which are added up over the heads of the group
// and the tokens of the block. Buckets are read by share over size: what is found for each key that
// is read, as in equation 1 of Squeezed Attention with the network's logits in the place of
// products with centroids.
#include <algorithm>
#include <cmath>

#include "libruntime/select/buckets.h"
#include "libruntime/select/classifier.h"

namespace sqz {
namespace {

class NetworkScorer final : public BucketScorer {
 public:
  explicit NetworkScorer(const SelectableIndex& index) : index_(index) {}

  int64_t floats(const LayerView& view) const override {
    return classifier_floats(view.head_dim, view.classifier.hidden, view.buckets);
  }

  void score(const SelectQuery& query, float* floats, std::span<float> scores) const override {
    add_shares(query, floats, scores);
    const uint32_t* sizes = index_.tables[query.layer].bucket_sizes.data() +
                            query.kv_head * static_cast<int64_t>(scores.size());
    const float rows = static_cast<float>(query.tokens * index_.group);
    for (size_t i = 0; i < scores.size(); ++i) {
      scores[i] = std::log(scores[i] / rows) - std::log(static_cast<float>(sizes[i]));
    }
  }

 private:
  // scores = shares of the attention, summed over the block's queries.
  void add_shares(const SelectQuery& query, float* floats, std::span<float> scores) const {
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
};

}  // namespace

Result<PreparedSelector> prepare_saap(const SelectorInputs& inputs,
                                      const SelectionRequest& request) {
  return prepare_buckets(inputs, request, "saap", std::make_unique<NetworkScorer>(inputs.index));
}

}  // namespace sqz
