// The selector `kmeans`, what SAAP's paper compares its classifier with (section 6.1): buckets are
// read by the product of the query before RoPE and the bucket's centroid, summed over the heads of
// the group and the tokens of the block, whatever the buckets' sizes.
#include <algorithm>

#include "libruntime/select/buckets.h"

namespace sqz {
namespace {

class CentroidScorer final : public BucketScorer {
 public:
  explicit CentroidScorer(const SelectableIndex& index) : index_(index) {}

  int64_t floats(const LayerView& view) const override { return view.head_dim; }

  void score(const SelectQuery& query, float* floats, std::span<float> scores) const override {
    const LayerView& view = index_.layers[query.layer];
    const int64_t dim = view.head_dim;
    std::fill_n(floats, dim, 0.0f);  // the sum of the queries
    for (int64_t t = 0; t < query.tokens; ++t) {
      const float* rows = query.queries + t * query.token_stride;
      for (int64_t i = 0; i < index_.group * dim; ++i) floats[i % dim] += rows[i];
    }
    const float* centroids =
        view.classifier.centroids + query.kv_head * static_cast<int64_t>(scores.size()) * dim;
    for (size_t c = 0; c < scores.size(); ++c, centroids += dim) {
      scores[c] = 0;
      for (int64_t i = 0; i < dim; ++i) scores[c] += floats[i] * centroids[i];
    }
  }

 private:
  SelectableIndex index_;
};

}  // namespace

Result<PreparedSelector> prepare_kmeans(const SelectorInputs& inputs,
                                        const SelectionRequest& request) {
  return prepare_buckets(inputs, request, "kmeans", std::make_unique<CentroidScorer>(inputs.index));
}

}  // namespace sqz
