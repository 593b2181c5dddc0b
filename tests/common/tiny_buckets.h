// A small index of buckets, with random keys, for tests: layer 0 of tiny_qmodel() is dense.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>

#include "formats/sqz_writer.h"
#include "tests/common/tiny_index.h"
#include "tests/common/tiny_qmodel.h"

namespace sqz::testing {

// Buckets are drawn at random, bucket 1 of every head is empty, and 3, 5, .. if more are to be; or
// all others have as many keys. Which key belongs where is the builder's business. sink 1, tail 99.
inline Result<uint64_t> write_tiny_buckets(const std::string& path, const QmodelFile& qmodel,
                                           int64_t tokens, Env& env = Env::posix(),
                                           int64_t empty = 1, bool even = false) {
  TinyIndexOptions o;
  o.layers = qmodel.model.layers;
  o.query_heads = qmodel.model.query_heads;
  o.kv_heads = qmodel.model.kv_heads;
  o.head_dim = qmodel.model.head_dim;
  o.tokens = tokens;
  o.sink = 1;
  o.tail = 99;
  o.page_size = 1;  // keys in any order, no means
  for (const int64_t layer : qmodel.dense) o.dense_layers.insert(layer);
  IndexMetadata m = tiny::metadata(o);
  m.model = qmodel.model;
  m.partition = Partition::kBuckets;
  m.page_size = 0;
  m.buckets = qmodel.buckets;
  m.hidden = qmodel.hidden;
  std::mt19937_64 rng(7);
  std::vector<TinyIndex::Layer> layers;
  for (int64_t l = 0; l < o.layers; ++l) {
    layers.push_back(tiny::random_layer(m, o, l, rng));
  }
  SQZ_ASSIGN_OR_RETURN(const auto writer,
                       SqzWriter::create(env, path, true, m, ClusterCounts(layers.size())));
  const int64_t buckets = qmodel.buckets, slots = tokens - o.sink - o.tail, d = o.head_dim;
  for (int64_t l = 0; l < o.layers; ++l) {
    TinyIndex::Layer& layer = layers[static_cast<size_t>(l)];
    LayerView data = layer_shape(m, l, {});
    std::vector<std::byte> keys, values, exact_keys, exact_values;
    std::vector<uint32_t> offsets;
    const bool dense = layer.shape.slots == 0;
    for (int64_t h = 0; h < o.kv_heads; ++h) {
      const float* k = layer.keys.data() + h * tokens * d;
      const float* v = layer.values.data() + h * tokens * d;
      const auto add = [&](int64_t t, std::vector<std::byte>& ks, std::vector<std::byte>& vs) {
        for (int64_t i = 0; i < d; ++i) tiny::append(ks, k[t * d + i], o.dtype);
        for (int64_t i = 0; i < d; ++i) tiny::append(vs, v[t * d + i], o.dtype);
      };
      for (int64_t t = 0; t < tokens; ++t) {
        if (dense || t < o.sink || t >= tokens - o.tail) add(t, exact_keys, exact_values);
      }
      if (dense) continue;
      std::vector<uint32_t> first = tiny::random_offsets(buckets - empty, slots, rng);
      for (int64_t i = 0; even && i <= buckets - empty; ++i) {
        first[i] = static_cast<uint32_t>(slots * i / (buckets - empty));
      }
      for (int64_t i = 1; i < 2 * empty; i += 2) first.insert(first.begin() + i, first[i]);
      offsets.insert(offsets.end(), first.begin(), first.end());
      uint32_t* positions = layer.positions.data() + h * slots;
      std::shuffle(positions, positions + slots, rng);
      for (int64_t c = 0; c < buckets; ++c) {
        std::sort(positions + first[c], positions + first[c + 1]);
      }
      for (int64_t s = 0; s < slots; ++s) add(positions[s], keys, values);
    }
    data.positions = layer.positions.data();
    data.bucket_offsets = offsets.data();
    data.classifier = view_of(qmodel.layers[static_cast<size_t>(l)], qmodel.hidden);
    data.keys = keys.data();
    data.values = values.data();
    data.exact_keys = exact_keys.data();
    data.exact_values = exact_values.data();
    SQZ_RETURN_IF_ERROR(writer->write_layer(l, data));
  }
  return writer->commit({});
}

}  // namespace sqz::testing
