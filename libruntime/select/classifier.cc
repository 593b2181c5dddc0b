#include "libruntime/select/classifier.h"

#include <algorithm>

namespace sqz {
namespace {

// Columns of `rows`, `lanes` apart; the lanes beyond them are zero.
void transpose(const float* const* rows, int64_t count, int64_t dim, int64_t lanes, float* out) {
  for (int64_t i = 0; i < dim; ++i) {
    float* to = out + i * lanes;
    for (int64_t r = 0; r < count; ++r) to[r] = rows[r][i];
    std::fill(to + count, to + lanes, 0.0f);
  }
}

}  // namespace

Classifier head_classifier(const LayerView& view, const LayerTable& table, int64_t kv_head) {
  const ClassifierView& c = view.classifier;
  Classifier out;
  out.dim = view.head_dim;
  out.hidden = c.hidden;
  out.buckets = view.buckets;
  out.hidden_weight = c.hidden_weight + kv_head * out.hidden * out.dim;
  out.hidden_bias = c.hidden_bias + kv_head * out.hidden;
  out.output_weight = c.output_weight + kv_head * out.buckets * out.hidden;
  out.output_bias = table.bucket_bias.data() + kv_head * out.buckets;
  return out;
}

int64_t classifier_floats(int64_t dim, int64_t hidden, int64_t buckets) {
  return kClassifierRows * (dim + hidden + buckets + 3);
}

void add_bucket_shares(const CpuKernels& kernels, const Classifier& n, const float* const* rows,
                       int64_t count, float* floats, std::span<float> shares) {
  if (count == 0) return;
  const int64_t lanes = round_up(count, kLanePad);
  float* queries = floats;                                // [d, lanes]
  float* hidden = queries + kClassifierRows * n.dim;      // [H, lanes]
  float* logits = hidden + kClassifierRows * n.hidden;    // [C, lanes]
  float* maximum = logits + kClassifierRows * n.buckets;  // [lanes]
  float* sum = maximum + kClassifierRows;
  float* factor = sum + kClassifierRows;
  transpose(rows, count, n.dim, lanes, queries);
  kernels.multiply(n.hidden_weight, n.dim, 1, queries, hidden, n.hidden, n.dim, lanes, false);
  for (int64_t h = 0; h < n.hidden; ++h) {
    float* row = hidden + h * lanes;
    for (int64_t r = 0; r < lanes; ++r) {
      const float x = row[r] + n.hidden_bias[h];
      row[r] = x < 0 ? 0 : x;  // a NaN stays
    }
  }
  kernels.multiply(n.output_weight, n.hidden, 1, hidden, logits, n.buckets, n.hidden, lanes, false);
  std::fill_n(maximum, lanes, kLowest);
  std::fill_n(sum, lanes, 0.0f);
  kernels.softmax_lanes(logits, n.output_bias, n.buckets, lanes, 1, maximum, sum, factor);
  for (int64_t r = 0; r < lanes; ++r) factor[r] = 1 / sum[r];
  kernels.scale_lanes(logits, n.buckets, lanes, factor);
  for (int64_t c = 0; c < n.buckets; ++c) {
    for (int64_t r = 0; r < count; ++r) shares[c] += logits[c * lanes + r];
  }
}

}  // namespace sqz
