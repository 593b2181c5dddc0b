// A small, valid query classifier for tests: random numbers, layer 0 dense.
#pragma once

#include <cmath>
#include <random>

#include "formats/base/hash.h"
#include "formats/qmodel_file.h"
#include "tests/common/tiny_model.h"

namespace sqz::testing {

struct TinyQmodelOptions {
  int64_t layers = 2, query_heads = 4, kv_heads = 2, head_dim = 4;
  int64_t buckets = 3, hidden = 5, recent = 16;
  uint64_t seed = 1;
};

inline QmodelFile tiny_qmodel(const TinyQmodelOptions& o = {}) {
  QmodelFile f;
  f.model = tiny_model(o.layers, o.query_heads, o.kv_heads, o.head_dim);
  f.tokenizer_hash = hex(uint64_t{2});
  f.buckets = o.buckets;
  f.hidden = o.hidden;
  f.recent = o.recent;
  f.dense = {0};
  f.training = {{"steps", 100}, {"device", "cpu"}};
  f.recall = {{0.05, 0.25}, {0.2, 0.5}};
  std::mt19937_64 random(o.seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& out, int64_t count) {
    out.resize(static_cast<size_t>(count));
    for (float& x : out) x = normal(random);
  };
  f.layers.resize(static_cast<size_t>(o.layers));
  for (size_t l = 1; l < f.layers.size(); ++l) {
    QmodelLayer& layer = f.layers[l];
    fill(layer.centroids, o.kv_heads * o.buckets * o.head_dim);
    for (auto row = layer.centroids.begin(); row != layer.centroids.end(); row += o.head_dim) {
      double square = 0;
      for (int64_t i = 0; i < o.head_dim; ++i) square += double{row[i]} * double{row[i]};
      for (int64_t i = 0; i < o.head_dim; ++i) row[i] /= static_cast<float>(std::sqrt(square));
    }
    fill(layer.hidden_weight, o.kv_heads * o.hidden * o.head_dim);
    fill(layer.hidden_bias, o.kv_heads * o.hidden);
    fill(layer.output_weight, o.kv_heads * o.buckets * o.hidden);
    fill(layer.output_bias, o.kv_heads * o.buckets);
  }
  return f;
}

}  // namespace sqz::testing
