#include "libruntime/select/classifier.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace sqz {
namespace {

// In lanes that a compiler makes vectors of; the order of the sums is fixed.
float dot(const float* a, const float* b, int64_t n) {
  constexpr int64_t kLanes = 16;
  std::array<float, kLanes> sums{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  for (int64_t step = kLanes / 2; step > 0; step /= 2) {
    for (int64_t lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
  }
  return sums[0];
}

void add_softmax(const float* logits, int64_t n, float* work, std::span<float> shares) {
  const float largest = *std::max_element(logits, logits + n);
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    work[i] = std::exp(logits[i] - largest);
    sum += work[i];
  }
  for (int64_t i = 0; i < n; ++i) shares[i] += work[i] / sum;
}

}  // namespace

Classifier head_classifier(const LayerView& view, int64_t kv_head) {
  const ClassifierView& c = view.classifier;
  Classifier out;
  out.dim = view.head_dim;
  out.hidden = c.hidden;
  out.buckets = view.buckets;
  out.hidden_weight = c.hidden_weight + kv_head * out.hidden * out.dim;
  out.hidden_bias = c.hidden_bias + kv_head * out.hidden;
  out.output_weight = c.output_weight + kv_head * out.buckets * out.hidden;
  out.output_bias = c.output_bias + kv_head * out.buckets;
  return out;
}

void add_bucket_shares(const Classifier& n, const float* const* rows, int64_t count, float* floats,
                       std::span<float> shares) {
  float* hidden = floats;                               // [count, H]
  float* logits = floats + kClassifierRows * n.hidden;  // [count, C]
  for (int64_t h = 0; h < n.hidden; ++h) {
    for (int64_t r = 0; r < count; ++r) {
      const float x = dot(n.hidden_weight + h * n.dim, rows[r], n.dim) + n.hidden_bias[h];
      hidden[r * n.hidden + h] = x < 0 ? 0 : x;  // a NaN stays
    }
  }
  for (int64_t c = 0; c < n.buckets; ++c) {
    for (int64_t r = 0; r < count; ++r) {
      logits[r * n.buckets + c] =
          dot(n.output_weight + c * n.hidden, hidden + r * n.hidden, n.hidden) + n.output_bias[c];
    }
  }
  for (int64_t r = 0; r < count; ++r) {
    float* row = logits + r * n.buckets;
    add_softmax(row, n.buckets, row, shares);
  }
}

}  // namespace sqz
