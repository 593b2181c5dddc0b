#include "tools/sqz_bench/synthetic_index.h"

#include <cmath>
#include <numeric>

#include "libindex/parallel.h"
#include "libindex/tree.h"
#include "tools/sqz_bench/made_numbers.h"

namespace sqz::bench {
namespace {

constexpr int64_t kCalibrationQueries = 32;
constexpr int kMixture = 4;  // coarse centres in a query
constexpr uint64_t kSeedStep = 1000003;

// All of the layer, in the order of the file.
struct Layer {
  struct Level {
    std::vector<BFloat16> centroids, value_means;  // [Hkv, n_k, d]
    std::vector<uint32_t> offsets;                 // [Hkv, n_k + 1]
  };
  std::vector<Level> levels;
  std::vector<BFloat16> keys, values;              // [Hkv, M, d]
  std::vector<BFloat16> exact_keys, exact_values;  // [Hkv, E, d]
  std::vector<uint32_t> positions;                 // [Hkv, M]
};

void append_query(const float* const* centres, int64_t dim, NormalRandom& random,
                  std::vector<float>& out) {
  float weight[kMixture];
  for (float& w : weight) w = 0.4f + 0.1f * random.normal();
  for (int64_t i = 0; i < dim; ++i) {
    float x = 0.3f * random.normal();
    for (int m = 0; m < kMixture; ++m) x += weight[m] * centres[m][i];
    out.push_back(x);
  }
}

// [tokens, Hkv * group, d] by centres [Hkv, n, d].
std::vector<float> mixtures(const std::vector<float>& centres, int64_t heads, int64_t group,
                            int64_t dim, int64_t tokens, uint64_t seed) {
  std::vector<float> out;
  NormalRandom random(seed);
  const int64_t clusters = std::ssize(centres) / (heads * dim);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const float* chosen[kMixture];
      for (const float*& c : chosen) {
        c = centres.data() + (h * clusters + random.below(clusters)) * dim;
      }
      for (int64_t g = 0; g < group; ++g) append_query(chosen, dim, random, out);
    }
  }
  return out;
}

class Maker {
 public:
  Maker(const Options& options, int64_t tokens)
      : options_(options),
        metadata_(made_metadata(options, tokens, 1)),
        slots_(tokens - kSink - kTail),
        clusters_(synthetic_clusters(tokens, slots_)),
        dim_(options.head_dim),
        heads_(options.kv_heads) {}

  Status write(const std::string& path) {
    fill();
    LayerData data;
    for (const Layer::Level& level : layer_.levels) {
      data.levels.push_back({std::as_bytes(std::span(level.centroids)),
                             std::as_bytes(std::span(level.value_means)), level.offsets});
    }
    data.positions = layer_.positions;
    data.keys = std::as_bytes(std::span(layer_.keys));
    data.values = std::as_bytes(std::span(layer_.values));
    data.exact_keys = std::as_bytes(std::span(layer_.exact_keys));
    data.exact_values = std::as_bytes(std::span(layer_.exact_values));
    std::vector<float> centres;
    for (const BFloat16 x : layer_.levels[0].centroids) centres.push_back(to_float(x));
    const std::vector<float> queries =
        mixtures(centres, heads_, options_.query_heads / heads_, dim_, kCalibrationQueries,
                 options_.seed * kSeedStep);
    return write_made_index(path, options_, metadata_, {clusters_, slots_, kSink + kTail}, data,
                            queries);
  }

 private:
  void fill() {
    layer_.levels.resize(clusters_.size());
    const auto vectors = [&](int64_t count) { return static_cast<size_t>(heads_ * count * dim_); };
    for (size_t k = 0; k < clusters_.size(); ++k) {
      layer_.levels[k].centroids.resize(vectors(clusters_[k]));
      layer_.levels[k].value_means.resize(vectors(clusters_[k]));
      layer_.levels[k].offsets.resize(static_cast<size_t>(heads_ * (clusters_[k] + 1)));
    }
    layer_.keys.resize(vectors(slots_));
    layer_.values.resize(vectors(slots_));
    layer_.exact_keys.resize(vectors(kSink + kTail));
    layer_.exact_values.resize(vectors(kSink + kTail));
    layer_.positions.resize(static_cast<size_t>(heads_ * slots_));
    (void)parallel_for(heads_, options_.threads, [&](int64_t head) {
      fill_head(head);
      return Status();
    });
  }

  void fill_head(int64_t head) {
    NormalRandom random(options_.seed * 7919 + static_cast<uint64_t>(head) + 1);
    const auto coarse_offsets = random_offsets(clusters_[0], clusters_[1], random);
    const auto fine_offsets = random_offsets(clusters_[1], slots_, random);
    std::copy(coarse_offsets.begin(), coarse_offsets.end(),
              layer_.levels[0].offsets.begin() + head * (clusters_[0] + 1));
    std::copy(fine_offsets.begin(), fine_offsets.end(),
              layer_.levels[1].offsets.begin() + head * (clusters_[1] + 1));
    fill_noise(layer_.exact_keys, head, kSink + kTail, random);
    fill_noise(layer_.exact_values, head, kSink + kTail, random);
    fill_noise(layer_.values, head, slots_, random);
    fill_keys(head, coarse_offsets, fine_offsets, random);
    for (const bool keys : {true, false}) fill_means(head, coarse_offsets, fine_offsets, keys);

    // A permutation of the clustered tokens with the runs that neighbours in a text leave.
    uint32_t* positions = layer_.positions.data() + head * slots_;
    std::iota(positions, positions + slots_, static_cast<uint32_t>(kSink));
    for (int64_t i = slots_ - 1; i > 0; --i)
      std::swap(positions[i], positions[random.below(i + 1)]);
  }

  void fill_noise(std::vector<BFloat16>& out, int64_t head, int64_t count,
                  NormalRandom& random) const {
    BFloat16* to = out.data() + head * count * dim_;
    for (int64_t i = 0; i < count * dim_; ++i) to[i] = to_bfloat16(random.normal());
  }

  void fill_keys(int64_t head, const std::vector<uint32_t>& coarse_offsets,
                 const std::vector<uint32_t>& fine_offsets, NormalRandom& random) {
    BFloat16* key = layer_.keys.data() + head * slots_ * dim_;
    std::vector<float> coarse(static_cast<size_t>(dim_)), fine(coarse.size());
    for (int64_t c = 0; c < clusters_[0]; ++c) {
      for (int64_t i = 0; i < dim_; ++i) coarse[i] = random.normal();
      for (uint32_t f = coarse_offsets[c]; f < coarse_offsets[c + 1]; ++f) {
        for (int64_t i = 0; i < dim_; ++i) fine[i] = coarse[i] + 0.6f * random.normal();
        for (uint32_t slot = fine_offsets[f]; slot < fine_offsets[f + 1]; ++slot, key += dim_) {
          for (int64_t i = 0; i < dim_; ++i) {
            key[i] = to_bfloat16(fine[i] + 0.6f * random.normal());
          }
        }
      }
    }
  }

  // Means of the stored vectors below each cluster, at both levels.
  void fill_means(int64_t head, const std::vector<uint32_t>& coarse_offsets,
                  const std::vector<uint32_t>& fine_offsets, bool keys) {
    const BFloat16* vectors = (keys ? layer_.keys : layer_.values).data() + head * slots_ * dim_;
    const auto out = [&](size_t k) {
      Layer::Level& level = layer_.levels[k];
      return (keys ? level.centroids : level.value_means).data() + head * clusters_[k] * dim_;
    };
    std::vector<float> fine(static_cast<size_t>(dim_)), coarse(static_cast<size_t>(dim_));
    const auto store = [&](const std::vector<float>& sum, uint32_t count, BFloat16* to) {
      for (int64_t i = 0; i < dim_; ++i) {
        to[i] = to_bfloat16(sum[i] / static_cast<float>(count));
      }
    };
    for (int64_t c = 0; c < clusters_[0]; ++c) {
      std::fill(coarse.begin(), coarse.end(), 0.0f);
      for (uint32_t f = coarse_offsets[c]; f < coarse_offsets[c + 1]; ++f) {
        std::fill(fine.begin(), fine.end(), 0.0f);
        for (uint32_t slot = fine_offsets[f]; slot < fine_offsets[f + 1]; ++slot) {
          for (int64_t i = 0; i < dim_; ++i) fine[i] += to_float(vectors[slot * dim_ + i]);
        }
        store(fine, fine_offsets[f + 1] - fine_offsets[f], out(1) + f * dim_);
        for (int64_t i = 0; i < dim_; ++i) coarse[i] += fine[i];
      }
      const uint32_t first = fine_offsets[coarse_offsets[c]];
      store(coarse, fine_offsets[coarse_offsets[c + 1]] - first, out(0) + c * dim_);
    }
  }

  const Options& options_;
  IndexMetadata metadata_;
  int64_t slots_;
  std::vector<int64_t> clusters_;
  int64_t dim_, heads_;
  Layer layer_;
};

}  // namespace

std::vector<int64_t> synthetic_clusters(int64_t tokens, int64_t slots) {
  return cluster_counts(std::vector<double>{0.01, 0.05}, tokens, slots);
}

Result<std::unique_ptr<TemporaryFile>> make_synthetic_index(const Options& options,
                                                            int64_t tokens) {
  SQZ_ASSIGN_OR_RETURN(auto file, index_file(options));
  Maker maker(options, tokens);
  SQZ_RETURN_IF_ERROR(maker.write(file->path()));
  return file;
}

std::vector<std::vector<float>> synthetic_queries(const LayerView& layer, int64_t group,
                                                  int64_t sets, int64_t tokens, uint64_t seed) {
  const int64_t count = layer.kv_heads * layer.level[0].clusters * layer.head_dim;
  std::vector<float> centres;
  for (int64_t i = 0; i < count; ++i) {
    centres.push_back(layer.dtype == DType::kF16
                          ? to_float(static_cast<const Float16*>(layer.level[0].centroids)[i])
                          : to_float(static_cast<const BFloat16*>(layer.level[0].centroids)[i]));
  }
  std::vector<std::vector<float>> out;
  for (int64_t set = 0; set < sets; ++set) {
    out.push_back(mixtures(centres, layer.kv_heads, group, layer.head_dim, tokens,
                           seed * kSeedStep + static_cast<uint64_t>(set) + 1));
  }
  return out;
}

}  // namespace sqz::bench
