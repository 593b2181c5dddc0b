// A small, valid, random index for tests: real clusters (keys scatter around one centre a finest
// cluster), a real tree, random positions, a made-up but well-formed calibration.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "formats/base/hash.h"
#include "formats/sqz_writer.h"
#include "tests/common/tiny_model.h"

namespace sqz::testing {

struct TinyIndexOptions {
  int64_t layers = 2;
  int64_t query_heads = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 8;
  int64_t tokens = 64;
  int64_t sink = 2;
  int64_t tail = 6;
  std::vector<int64_t> clusters = {3, 9};  // n_k, coarse to fine
  int64_t page_size = 0;                   // > 0: pages of so many tokens, no clusters
  bool heavy_hitters = false;              // a random order
  std::vector<int64_t> layer_budgets;      // [layers] to embed, of a context of `tokens`; their
                                           // sum a multiple of `layers`; empty: none
  std::set<int64_t> dense_layers;          // stored dense, full attention
  std::map<int64_t, int64_t> windows;      // layer -> sliding window: dense, too
  DType dtype = DType::kBF16;
  bool has_value_means = true;
  double spread = 0.5;  // of keys around their cluster's centre, whose entries are N(0, 1)
  uint64_t seed = 1;
  std::string tokens_hash = "00000000000000bb";
  std::vector<std::string> after;  // ids of the contexts that stood in front
};

// The contents of the file, for comparison.
struct TinyIndex {
  struct Layer {
    // As the file's dtype holds them, in token order.
    std::vector<float> keys;    // [Hkv, N, d]
    std::vector<float> values;  // [Hkv, N, d]
    struct {
      std::vector<int64_t> clusters;  // of each level
      int64_t slots = 0, exact = 0;
    } shape;
    std::vector<std::vector<uint32_t>> offsets;  // per level [Hkv, n_k + 1]
    std::vector<uint32_t> positions;             // [Hkv, M]
    std::vector<uint32_t> heavy;                 // [Hkv, M], or empty
  };
  TinyIndexOptions options;
  IndexMetadata metadata;
  std::vector<Layer> layers;
  Calibration calibration;
  uint64_t bytes = 0;  // of the file
};

namespace tiny {

inline void append(std::vector<std::byte>& out, float x, DType dtype) {
  const uint16_t bits = dtype == DType::kBF16 ? to_bfloat16(x).bits : to_float16(x).bits;
  out.push_back(static_cast<std::byte>(bits & 0xff));
  out.push_back(static_cast<std::byte>(bits >> 8));
}

inline float rounded(float x, DType dtype) {
  return dtype == DType::kBF16 ? to_float(to_bfloat16(x)) : to_float(to_float16(x));
}

// n runs that cover [0, end), none empty: [n + 1] first entries.
inline std::vector<uint32_t> random_offsets(int64_t n, int64_t end, std::mt19937_64& rng) {
  std::vector<uint32_t> cuts(static_cast<size_t>(end - 1));
  std::iota(cuts.begin(), cuts.end(), 1u);
  std::shuffle(cuts.begin(), cuts.end(), rng);
  cuts.resize(static_cast<size_t>(n - 1));
  cuts.push_back(0);
  cuts.push_back(static_cast<uint32_t>(end));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

// Means of vectors[positions[slot]] over the slots [first[i], first[i + 1]).
inline void append_means(std::vector<std::byte>& out, const std::vector<uint32_t>& first,
                         const uint32_t* positions, const float* vectors, int64_t d, DType dtype) {
  for (size_t i = 0; i + 1 < first.size(); ++i) {
    for (int64_t c = 0; c < d; ++c) {
      double sum = 0;
      for (uint32_t slot = first[i]; slot < first[i + 1]; ++slot) {
        sum += vectors[positions[slot] * d + c];
      }
      append(out, static_cast<float>(sum / (first[i + 1] - first[i])), dtype);
    }
  }
}

// The least (or greatest) number of each dimension over each page of the slots' keys.
inline void append_bounds(std::vector<std::byte>& out, bool greatest, const uint32_t* positions,
                          const float* keys, const TinyIndexOptions& o, int64_t slots) {
  for (int64_t first = 0; first < slots; first += o.page_size) {
    for (int64_t c = 0; c < o.head_dim; ++c) {
      float bound = keys[positions[first] * o.head_dim + c];
      for (int64_t slot = first; slot < std::min(first + o.page_size, slots); ++slot) {
        const float x = keys[positions[slot] * o.head_dim + c];
        bound = greatest ? std::max(bound, x) : std::min(bound, x);
      }
      append(out, bound, o.dtype);
    }
  }
}

inline IndexMetadata metadata(const TinyIndexOptions& o) {
  IndexMetadata m;
  m.model = tiny_model(o.layers, o.query_heads, o.kv_heads, o.head_dim);
  m.tokenizer_hash = "00000000000000aa";
  m.tokens_hash = o.tokens_hash;
  m.after = o.after;
  m.tokens = o.tokens;
  m.sink = o.sink;
  m.tail = o.tail;
  m.dtype = o.dtype;
  m.has_value_means = o.has_value_means && o.page_size == 0;
  m.partition = o.page_size > 0 ? Partition::kPages : Partition::kKmeans;
  m.page_size = o.page_size;
  m.heavy_hitters = o.heavy_hitters;
  if (!o.layer_budgets.empty()) {
    LayerBudgets budgets;
    budgets.allocation = "groups";
    budgets.context = o.tokens;
    budgets.budget = o.layer_budgets;
    budgets.uniform_budget =
        std::accumulate(o.layer_budgets.begin(), o.layer_budgets.end(), int64_t{0}) / o.layers;
    budgets.cosine.assign(static_cast<size_t>(o.layers), 0.5);
    m.layer_budgets = budgets;
  }
  m.build = {{"seed", o.seed}};
  for (int64_t l = 0; l < o.layers; ++l) {
    LayerPolicy policy;
    if (const auto window = o.windows.find(l); window != o.windows.end()) {
      policy.window = window->second;
    }
    policy.dense = policy.window > 0 || o.dense_layers.contains(l);
    m.model.sliding_window[static_cast<size_t>(l)] = policy.window;
    m.layers.push_back(policy);
    if (!policy.dense && o.page_size == 0) m.levels = static_cast<int>(o.clusters.size());
  }
  return m;
}

inline TinyIndex::Layer random_layer(const IndexMetadata& m, const TinyIndexOptions& o, int64_t l,
                                     std::mt19937_64& rng) {
  const LayerPolicy& policy = m.layers[static_cast<size_t>(l)];
  TinyIndex::Layer layer;
  std::normal_distribution<float> normal;
  const auto size = static_cast<size_t>(o.kv_heads * o.tokens * o.head_dim);
  for (std::vector<float>* x : {&layer.keys, &layer.values}) {
    x->resize(size);
    for (float& v : *x) v = rounded(normal(rng), o.dtype);
  }
  if (policy.dense) {
    layer.shape.exact = policy.window > 0 ? std::min(policy.window, o.tokens) : o.tokens;
    return layer;
  }
  layer.shape = {o.clusters, o.tokens - o.sink - o.tail, o.sink + o.tail};
  std::mt19937_64 heavy_rng(o.seed + 1000 + static_cast<uint64_t>(l));  // rng stays as it was
  for (int64_t h = 0; o.heavy_hitters && h < o.kv_heads; ++h) {
    std::vector<uint32_t> order(static_cast<size_t>(layer.shape.slots));
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), heavy_rng);
    layer.heavy.insert(layer.heavy.end(), order.begin(), order.end());
  }
  if (o.page_size > 0) {
    layer.shape.clusters.clear();
    for (int64_t i = 0; i < o.kv_heads * layer.shape.slots; ++i) {
      layer.positions.push_back(static_cast<uint32_t>(o.sink + i % layer.shape.slots));
    }
    return layer;
  }
  layer.offsets.resize(o.clusters.size());
  for (int64_t h = 0; h < o.kv_heads; ++h) {
    for (size_t k = 0; k < o.clusters.size(); ++k) {
      const int64_t end = k + 1 < o.clusters.size() ? o.clusters[k + 1] : layer.shape.slots;
      const auto first = random_offsets(o.clusters[k], end, rng);
      layer.offsets[k].insert(layer.offsets[k].end(), first.begin(), first.end());
    }
    std::vector<uint32_t> positions(static_cast<size_t>(layer.shape.slots));
    std::iota(positions.begin(), positions.end(), static_cast<uint32_t>(o.sink));
    std::shuffle(positions.begin(), positions.end(), rng);
    layer.positions.insert(layer.positions.end(), positions.begin(), positions.end());
    const uint32_t* finest =
        &layer.offsets.back()[static_cast<size_t>(h * (o.clusters.back() + 1))];
    for (int64_t c = 0; c < o.clusters.back(); ++c) {
      std::vector<float> centre(static_cast<size_t>(o.head_dim));
      for (float& v : centre) v = normal(rng);
      for (uint32_t slot = finest[c]; slot < finest[c + 1]; ++slot) {
        for (int64_t i = 0; i < o.head_dim; ++i) {
          float& key =
              layer.keys[static_cast<size_t>((h * o.tokens + positions[slot]) * o.head_dim + i)];
          key =
              rounded(centre[static_cast<size_t>(i)] + static_cast<float>(o.spread) * key, o.dtype);
        }
      }
    }
  }
  return layer;
}

// The slots below each cluster of level `k` (0-based) of one head: [n_k + 1] first slots.
inline std::vector<uint32_t> first_slots(const TinyIndex::Layer& layer, int64_t head, size_t k) {
  std::vector<uint32_t> first;
  for (size_t level = layer.offsets.size(); level-- > k;) {
    const auto n = static_cast<size_t>(layer.shape.clusters[level]) + 1;
    const uint32_t* own = &layer.offsets[level][static_cast<size_t>(head) * n];
    std::vector<uint32_t> next(own, own + n);
    if (!first.empty()) {
      for (uint32_t& child : next) child = first[child];
    }
    first = std::move(next);
  }
  return first;
}

inline Status write_layer(SqzWriter& writer, const TinyIndexOptions& o, int64_t l,
                          const TinyIndex::Layer& layer) {
  const int64_t d = o.head_dim;
  struct Stored {
    std::vector<std::byte> centroids, value_means;
  };
  std::vector<Stored> levels(layer.shape.clusters.size());
  std::vector<std::byte> keys, values, exact_keys, exact_values, page_min, page_max;
  for (int64_t h = 0; h < o.kv_heads; ++h) {
    const float* k = &layer.keys[static_cast<size_t>(h * o.tokens * d)];
    const float* v = &layer.values[static_cast<size_t>(h * o.tokens * d)];
    const auto add_token = [&](int64_t t, std::vector<std::byte>& ks, std::vector<std::byte>& vs) {
      for (int64_t i = 0; i < d; ++i) append(ks, k[t * d + i], o.dtype);
      for (int64_t i = 0; i < d; ++i) append(vs, v[t * d + i], o.dtype);
    };
    const uint32_t* positions = layer.positions.data() + h * layer.shape.slots;
    for (size_t level = 0; level < levels.size(); ++level) {
      const auto first = first_slots(layer, h, level);
      append_means(levels[level].centroids, first, positions, k, d, o.dtype);
      append_means(levels[level].value_means, first, positions, v, d, o.dtype);
    }
    for (int64_t slot = 0; slot < layer.shape.slots; ++slot) {
      add_token(positions[slot], keys, values);
    }
    if (o.page_size > 0) {
      append_bounds(page_min, false, positions, k, o, layer.shape.slots);
      append_bounds(page_max, true, positions, k, o, layer.shape.slots);
    }
    // Sparse: sink then tail. Dense: the last `exact` tokens, which is all of them but for windows.
    const int64_t head_part = layer.shape.slots > 0 ? o.sink : 0;
    for (int64_t t = 0; t < head_part; ++t) add_token(t, exact_keys, exact_values);
    for (int64_t t = o.tokens - (layer.shape.exact - head_part); t < o.tokens; ++t) {
      add_token(t, exact_keys, exact_values);
    }
  }
  LayerView data = layer_shape(metadata(o), l, layer.shape.clusters);
  for (size_t level = 0; level < levels.size(); ++level) {
    data.level[level].centroids = levels[level].centroids.data();
    data.level[level].value_means = levels[level].value_means.data();
    data.level[level].offsets = layer.offsets[level].data();
  }
  data.page_min = page_min.data();
  data.page_max = page_max.data();
  data.positions = layer.positions.data();
  data.heavy = layer.heavy.data();
  data.keys = keys.data();
  data.values = values.data();
  data.exact_keys = exact_keys.data();
  data.exact_values = exact_values.data();
  return writer.write_layer(l, data);
}

inline Calibration calibration(const IndexMetadata& m) {
  using C = Calibration;
  Calibration c;
  if (m.levels == 0) return c;
  c.queries = m.tail;
  c.source = "tail";
  for (int k = 1; k < m.levels; ++k) c.coarse_keep.push_back(std::pow(0.5, k));
  for (int curve = 0; curve < C::kScopes * C::kPaths; ++curve) {
    for (int64_t i = 0; i < C::kGrid; ++i) {
      const float t = 1.0f - 20.0f * static_cast<float>(i) / (C::kGrid - 1);
      c.thresholds.push_back(i + 1 == C::kGrid ? -INFINITY : t);
    }
  }
  for (int i = 0; i < C::kScopes; ++i) {
    for (int k = 0; k < std::max(m.levels - 1, 1); ++k) {
      c.coarse.push_back(-3.0f - static_cast<float>(k));
    }
  }
  for (int scope = 0; scope < C::kScopes; ++scope) {
    for (int64_t head = 0; head < m.model.layers * m.model.kv_heads; ++head) {
      const bool dense = m.layers[static_cast<size_t>(head / m.model.kv_heads)].dense;
      for (int64_t i = 0; i < C::kGrid; ++i) {
        c.shares.push_back(dense ? 1.0f : static_cast<float>(i) / (C::kGrid - 1));
      }
    }
  }
  return c;
}

}  // namespace tiny

inline Result<TinyIndex> write_tiny_index(const std::string& path,
                                          const TinyIndexOptions& options = {},
                                          Env& env = Env::posix(), bool replace = true) {
  TinyIndex index;
  index.options = options;
  index.metadata = tiny::metadata(options);
  index.calibration = tiny::calibration(index.metadata);
  std::mt19937_64 rng(options.seed);
  ClusterCounts clusters;
  for (int64_t l = 0; l < options.layers; ++l) {
    index.layers.push_back(tiny::random_layer(index.metadata, options, l, rng));
    clusters.push_back(index.layers.back().shape.clusters);
  }
  SQZ_ASSIGN_OR_RETURN(const auto writer,
                       SqzWriter::create(env, path, replace, index.metadata, clusters));
  for (int64_t l = 0; l < options.layers; ++l) {
    SQZ_RETURN_IF_ERROR(
        tiny::write_layer(*writer, options, l, index.layers[static_cast<size_t>(l)]));
  }
  SQZ_ASSIGN_OR_RETURN(index.bytes, writer->commit(index.calibration));
  return index;
}

}  // namespace sqz::testing
