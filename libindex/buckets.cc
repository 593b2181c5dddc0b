#include "libindex/buckets.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "libindex/parallel.h"
#include "libruntime/rope.h"

namespace sqz {
namespace {

// In lanes that a compiler makes vectors of; the order of the sums is fixed.
float dot(const float* a, const float* b, int64_t n) {
  constexpr int64_t kLanes = 8;
  std::array<float, kLanes> sums{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  return std::accumulate(sums.begin(), sums.end(), 0.0f);
}

uint32_t nearest(const float* centroids, int64_t buckets, const float* key, int64_t dim) {
  uint32_t best = 0;
  float most = dot(centroids, key, dim);
  for (int64_t c = 1; c < buckets; ++c) {
    const float product = dot(centroids + c * dim, key, dim);
    if (product <= most) continue;
    most = product;
    best = static_cast<uint32_t>(c);
  }
  return best;
}

float as_stored(float x, DType dtype) {
  return dtype == DType::kBF16 ? to_float(to_bfloat16(x)) : to_float(to_float16(x));
}

}  // namespace

Result<BucketOrder> order_by_bucket(const QmodelFile& qmodel, int64_t layer, const BucketKeys& from,
                                    int threads) {
  const int64_t count = from.count, first = from.first;
  const int64_t heads = qmodel.model.kv_heads, dim = qmodel.model.head_dim,
                buckets = qmodel.buckets;
  const std::vector<float>& centroids = qmodel.layers[static_cast<size_t>(layer)].centroids;
  const RopeUndo rope(qmodel.model.rope, dim);
  BucketOrder out;
  out.heads.resize(static_cast<size_t>(heads));
  out.offsets.assign(static_cast<size_t>(heads * (buckets + 1)), 0);
  SQZ_RETURN_IF_ERROR(parallel_for(heads, threads, [&](int64_t head) {
    std::vector<float> angles(static_cast<size_t>(dim)), key(angles.size()), stored(angles.size());
    std::vector<uint32_t> bucket(static_cast<size_t>(count));
    uint32_t* offsets = out.offsets.data() + head * (buckets + 1);
    for (int64_t i = 0; i < count; ++i) {
      const float* row = from.keys.data() + (head * from.tokens + first + i) * dim;
      std::transform(row, row + dim, stored.data(),
                     [&](float x) { return as_stored(x, from.dtype); });
      rope.apply(first + i, stored.data(), 1, angles.data(), key.data());
      bucket[i] = nearest(centroids.data() + head * buckets * dim, buckets, key.data(), dim);
      ++offsets[bucket[i] + 1];
    }
    std::partial_sum(offsets, offsets + buckets + 1, offsets);
    std::vector<uint32_t> next(offsets, offsets + buckets);
    std::vector<uint32_t>& slots = out.heads[head].keys;
    slots.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) slots[next[bucket[i]]++] = static_cast<uint32_t>(i);
    return Status();
  }));
  return out;
}

QmodelFile embedded_qmodel(const SqzFile& index) {
  const IndexMetadata& metadata = index.metadata();
  QmodelFile out;
  out.model = metadata.model;
  out.tokenizer_hash = metadata.tokenizer_hash;
  out.buckets = metadata.buckets;
  out.hidden = metadata.hidden;
  const auto recent = metadata.build.find("trained_for_recent");
  if (recent != metadata.build.end() && recent->is_number_integer()) {
    out.recent = recent->get<int64_t>();
  }
  const int64_t heads = metadata.model.kv_heads, dim = metadata.model.head_dim;
  const int64_t buckets = out.buckets, hidden = out.hidden;
  out.layers.resize(static_cast<size_t>(metadata.model.layers));
  for (int64_t l = 0; l < metadata.model.layers; ++l) {
    const LayerView view = index.layer(l);
    if (view.buckets == 0) {
      if (metadata.layers[static_cast<size_t>(l)].window == 0) out.dense.push_back(l);
      continue;
    }
    const ClassifierView& from = view.classifier;
    QmodelLayer& layer = out.layers[static_cast<size_t>(l)];
    layer.centroids.assign(from.centroids, from.centroids + heads * buckets * dim);
    layer.hidden_weight.assign(from.hidden_weight, from.hidden_weight + heads * hidden * dim);
    layer.hidden_bias.assign(from.hidden_bias, from.hidden_bias + heads * hidden);
    layer.output_weight.assign(from.output_weight, from.output_weight + heads * buckets * hidden);
    layer.output_bias.assign(from.output_bias, from.output_bias + heads * buckets);
  }
  return out;
}

}  // namespace sqz
