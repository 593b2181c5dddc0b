#include "tools/sqz_bench/made_index.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "formats/base/parallel.h"
#include "formats/qmodel_file.h"
#include "formats/sqz_writer.h"
#include "libindex/calibrate.h"
#include "libindex/layer_store.h"
#include "libindex/order.h"
#include "libindex/tree.h"

namespace sqz::bench {
namespace {

constexpr int64_t kPageSize = 16;
constexpr int64_t kCalibrationQueries = 32;
constexpr double kLevelFractions[] = {0.01, 0.05};

void fill(std::span<float> to, double scale, Random& random) {
  for (float& x : to) x = static_cast<float>(scale) * normal(random);
}

// n runs of varied length over [0, total), none empty: [n + 1].
std::vector<uint32_t> random_offsets(int64_t n, int64_t total, Random& random) {
  std::vector<double> weight(static_cast<size_t>(n));
  for (double& w : weight) w = std::exp(0.6 * normal(random));
  const double scale =
      static_cast<double>(total - n) / std::accumulate(weight.begin(), weight.end(), 0.0);
  std::vector<uint32_t> offsets = {0};
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += weight[static_cast<size_t>(i)] * scale;
    offsets.push_back(static_cast<uint32_t>(i + 1 + std::llround(sum)));
  }
  offsets.back() = static_cast<uint32_t>(total);
  return offsets;
}

std::vector<uint32_t> permutation(int64_t n, Random& random) {
  std::vector<uint32_t> out(static_cast<size_t>(n));
  std::iota(out.begin(), out.end(), 0u);
  for (int64_t i = n - 1; i > 0; --i)
    std::swap(out[i], out[random.below(static_cast<uint64_t>(i) + 1)]);
  return out;
}

// Coarse centroids [Hkv, n, d] of a layer, as it stores them.
struct Centres {
  std::vector<float> values;
  int64_t heads = 0, dim = 0;

  Centres(const void* data, int64_t kv_heads, int64_t clusters, int64_t head_dim, DType dtype)
      : values(static_cast<size_t>(kv_heads * clusters * head_dim)),
        heads(kv_heads),
        dim(head_dim) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = dtype == DType::kF16 ? to_float(static_cast<const Float16*>(data)[i])
                                       : to_float(static_cast<const BFloat16*>(data)[i]);
    }
  }

  // Queries [tokens, Hkv * group, d].
  std::vector<float> queries(int64_t tokens, int64_t group, uint64_t seed) const {
    constexpr int kMixture = 4;
    const int64_t clusters = std::ssize(values) / (heads * dim);
    Random random(seed * 1000003);
    std::vector<float> out;
    for (int64_t row = 0; row < tokens * heads; ++row) {
      const float* centre[kMixture];
      for (const float*& c : centre) {
        c = values.data() + (row % heads * clusters +
                             static_cast<int64_t>(random.below(static_cast<uint64_t>(clusters)))) *
                                dim;
      }
      for (int64_t g = 0; g < group; ++g) {
        float weight[kMixture];
        for (float& w : weight) w = 0.4f + 0.1f * normal(random);
        for (int64_t i = 0; i < dim; ++i) {
          float x = 0.3f * normal(random);
          for (int m = 0; m < kMixture; ++m) x += weight[m] * centre[m][i];
          out.push_back(x);
        }
      }
    }
    return out;
  }
};

IndexMetadata metadata_of(const MadeIndex& made) {
  IndexMetadata m;
  m.model.architecture = "LlamaForCausalLM";
  m.model.layers = 1;
  m.model.query_heads = made.query_heads;
  m.model.kv_heads = made.kv_heads;
  m.model.head_dim = made.head_dim;
  m.model.hidden_size = made.query_heads * made.head_dim;
  m.model.vocab_size = 128256;
  m.model.max_positions = std::max<int64_t>(made.tokens, 131072);
  m.model.sliding_window = {0};
  m.model.weights_hash = m.tokens_hash = "0000000000000000";
  m.model.attention_scale = 1 / std::sqrt(static_cast<double>(made.head_dim));
  m.tokens = made.tokens;
  m.sink = kSink;
  m.tail = kTail;
  m.levels = std::size(kLevelFractions);
  m.layers.resize(1);
  m.build = {{"engine", "sqz-bench"}, {"seed", made.seed}};
  if (made.selector == "squeezed") return m;
  const bool pages = made.selector == "quest";
  m.partition = pages ? Partition::kPages : Partition::kBuckets;
  m.levels = 0;
  m.has_value_means = false;
  m.page_size = pages ? kPageSize : 0;
  m.buckets = m.hidden = pages ? 0 : made.buckets;
  return m;
}

QmodelLayer make_classifier(const MadeIndex& made) {
  auto make = [&, random = Random(made.seed * 31 + 5)](int64_t size, double scale) mutable {
    std::vector<float> out(static_cast<size_t>(made.kv_heads * size));
    fill(out, scale, random);
    return out;
  };
  const int64_t n = made.buckets, dim = made.head_dim;
  const double dim_scale = 1 / std::sqrt(static_cast<double>(dim));
  QmodelLayer out;
  out.centroids = make(n * dim, dim_scale);
  out.hidden_weight = make(n * dim, dim_scale);
  out.hidden_bias = make(n, 0.1);
  out.output_weight = make(n * n, 2 / std::sqrt(static_cast<double>(n)));
  out.output_bias = make(n, 0.1);
  return out;
}

// One KV head in clusters.
struct MadeHead {
  SlotOrder order;
  std::vector<float> keys;  // [slots, d] in slot order
};

MadeHead make_head(const MadeIndex& made, int64_t head) {
  Random random(made.seed * 7919 + static_cast<uint64_t>(head) + 1);
  const int64_t slots = made.slots(), dim = made.head_dim;
  const std::vector<int64_t> clusters = cluster_counts(kLevelFractions, made.tokens, slots);
  MadeHead out;
  SlotOrder& order = out.order;
  order.offsets = {random_offsets(clusters[0], clusters[1], random),
                   random_offsets(clusters[1], slots, random)};
  order.means.resize(2);
  order.keys = permutation(slots, random);
  out.keys.reserve(static_cast<size_t>(slots * dim));
  const std::vector<std::vector<uint32_t>> first = first_slots(order.offsets);
  std::vector<float> centre(static_cast<size_t>(dim)), fine(centre.size());
  for (int64_t c = 0; c < clusters[0]; ++c) {
    fill(centre, 1, random);
    for (uint32_t f = order.offsets[0][c]; f < order.offsets[0][c + 1]; ++f) {
      for (int64_t i = 0; i < dim; ++i) fine[i] = centre[i] + 0.6f * normal(random);
      for (uint32_t slot = order.offsets[1][f]; slot < order.offsets[1][f + 1]; ++slot) {
        for (const float x : fine) out.keys.push_back(x + 0.6f * normal(random));
      }
    }
  }
  for (size_t level = 0; level < 2; ++level) {
    for (size_t c = 0; c + 1 < first[level].size(); ++c) {
      std::fill(fine.begin(), fine.end(), 0.0f);
      for (uint32_t slot = first[level][c]; slot < first[level][c + 1]; ++slot) {
        for (int64_t i = 0; i < dim; ++i) fine[i] += out.keys[slot * dim + i];
      }
      const auto size = static_cast<float>(first[level][c + 1] - first[level][c]);
      for (const float x : fine) order.means[level].push_back(x / size);
    }
  }
  return out;
}

// Keys and values in token order, and the order of the slots of each head.
struct MadeLayer {
  explicit MadeLayer(const MadeIndex& made) {
    const auto size = static_cast<size_t>(made.kv_heads * made.tokens * made.head_dim);
    keys.resize(size);
    values.resize(size);
    order.heads.resize(static_cast<size_t>(made.kv_heads));
    order.offsets.resize(static_cast<size_t>(made.kv_heads * (made.buckets + 1)));
  }

  void fill_head(const MadeIndex& made, int64_t head) {
    const int64_t dim = made.head_dim, size = made.tokens * dim;
    float* head_keys = keys.data() + head * size;
    Random random(made.seed * 104729 + static_cast<uint64_t>(head) + 1);
    fill({head_keys, static_cast<size_t>(size)}, 1, random);
    fill({values.data() + head * size, static_cast<size_t>(size)}, 1, random);
    SlotOrder& slots = order.heads[static_cast<size_t>(head)];
    if (made.selector == "squeezed") {
      MadeHead clustered = make_head(made, head);
      slots = std::move(clustered.order);
      for (int64_t slot = 0; slot < made.slots(); ++slot) {
        std::copy_n(clustered.keys.data() + slot * dim, dim,
                    head_keys + (kSink + slots.keys[static_cast<size_t>(slot)]) * dim);
      }
    } else if (made.selector == "saap") {
      slots.keys = permutation(made.slots(), random);
      const auto offsets = random_offsets(made.buckets, made.slots(), random);
      std::copy(offsets.begin(), offsets.end(), order.offsets.begin() + head * (made.buckets + 1));
      for (int64_t b = 0; b < made.buckets; ++b) {
        std::sort(slots.keys.begin() + offsets[b], slots.keys.begin() + offsets[b + 1]);
      }
    }
  }

  std::vector<float> keys, values;  // [Hkv, N, d]
  BucketOrder order;
};

Result<Calibration> calibration_of(const MadeIndex& made, const IndexMetadata& metadata,
                                   const LayerBuffers& buffers) {
  if (buffers.levels.empty()) return Calibration();
  const int64_t group = metadata.model.group_size(), dim = made.head_dim, n = kCalibrationQueries;
  CalibrationInput input = calibration_input(metadata, "made-up queries");
  input.queries = n;
  CalibrationLayer& layer = input.sparse.emplace_back();
  for (const LayerBuffers::Level& level : buffers.levels) {
    layer.levels.push_back({level.centroids, level.offsets});
  }
  const auto& coarse = buffers.levels[0];
  const int64_t clusters = std::ssize(coarse.offsets) / made.kv_heads - 1;
  const Centres centres(coarse.centroids.data(), made.kv_heads, clusters, dim, DType::kBF16);
  layer.queries = group_queries(centres.queries(n, group, made.seed).data(), made.kv_heads, group,
                                n, dim, /*by_token=*/true);
  return calibrate(input, made.threads);
}

}  // namespace

Status make_index(const MadeIndex& made, const std::string& path) {
  const IndexMetadata metadata = metadata_of(made);
  MadeLayer layer(made);
  SQZ_RETURN_IF_ERROR(parallel_for(made.kv_heads, made.threads, [&](int64_t head) {
    layer.fill_head(made, head);
    return Status();
  }));
  const float *keys = layer.keys.data(), *values = layer.values.data();
  LayerStore store(made.kv_heads, made.tokens, made.head_dim, DType::kBF16);
  QmodelLayer classifier;
  if (metadata.levels > 0) {
    SQZ_RETURN_IF_ERROR(store.fill_sparse(keys, values, layer.order.heads, kSink, made.threads));
  } else if (metadata.page_size > 0) {
    SQZ_RETURN_IF_ERROR(
        store.fill_pages(keys, values, kSink, made.slots(), kPageSize, made.threads));
  } else {
    classifier = make_classifier(made);
    SQZ_RETURN_IF_ERROR(
        store.fill_buckets(keys, values, layer.order, classifier, kSink, made.threads));
  }
  SQZ_ASSIGN_OR_RETURN(const Calibration calibration,
                       calibration_of(made, metadata, store.buffers()));
  std::vector<int64_t> clusters;
  for (const LayerBuffers::Level& level : store.buffers().levels) {
    clusters.push_back(std::ssize(level.offsets) / made.kv_heads - 1);
  }
  LayerView data = layer_shape(metadata, 0, clusters);
  store.point(data);
  SQZ_ASSIGN_OR_RETURN(const auto writer,
                       SqzWriter::create(Env::posix(), path, false, metadata, {clusters}));
  SQZ_RETURN_IF_ERROR(writer->write_layer(0, data));
  return writer->commit(calibration).status();
}

std::vector<std::vector<float>> make_queries(const SqzFile& file, int64_t sets, int64_t tokens,
                                             uint64_t seed) {
  const ModelDescription& model = file.metadata().model;
  const LayerView view = file.layer(0);
  std::vector<std::vector<float>> out(static_cast<size_t>(sets));
  if (view.levels == 0) {
    Random random(seed * 31 + 17);
    for (auto& set : out) {
      set.resize(static_cast<size_t>(tokens * model.query_heads * model.head_dim));
      fill(set, 1, random);
    }
    return out;
  }
  const Centres centres(view.level[0].centroids, view.kv_heads, view.level[0].clusters,
                        view.head_dim, view.dtype);
  for (auto& set : out) set = centres.queries(tokens, model.group_size(), ++seed);
  return out;
}

}  // namespace sqz::bench
