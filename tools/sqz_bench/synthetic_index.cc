#include "tools/sqz_bench/synthetic_index.h"

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "formats/sqz_writer.h"
#include "libindex/builder.h"
#include "libindex/calibrate.h"
#include "libindex/parallel.h"
#include "libindex/tree.h"

namespace sqz::bench {
namespace {

constexpr int64_t kSink = 16, kTail = 100;
constexpr int64_t kCalibrationQueries = 32;
constexpr int kMixture = 4;  // coarse centres in a query

// Fast and the same everywhere: splitmix64, and a sum of four uniforms for a normal number.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  float normal() {
    const uint64_t bits = next();
    const auto sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    return (static_cast<float>(sum) * 0x1p-16f - 2.0f) * 1.7320508f;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

// n runs of varied length over [0, total), none empty: [n + 1].
std::vector<uint32_t> random_offsets(int64_t n, int64_t total, Random& random) {
  std::vector<double> weight(static_cast<size_t>(n));
  for (double& w : weight) w = std::exp(0.6 * random.normal());
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
  std::vector<float> coarse;                       // [Hkv, n_1, d] centres, not means
};

class Maker {
 public:
  Maker(const Options& options, int64_t tokens)
      : options_(options),
        metadata_(synthetic_metadata(options, tokens, 1)),
        slots_(tokens - kSink - kTail),
        clusters_(synthetic_clusters(tokens, slots_)),
        dim_(options.head_dim),
        heads_(options.kv_heads) {}

  Status write(const std::string& path) {
    fill();
    SQZ_ASSIGN_OR_RETURN(const Calibration calibration, calibrate_layer());
    const LayerShape shape{clusters_, slots_, kSink + kTail};
    SQZ_ASSIGN_OR_RETURN(const auto writer,
                         SqzWriter::create(Env::posix(), path, false, metadata_, {shape}));
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
    SQZ_RETURN_IF_ERROR(writer->write_layer(0, data));
    return writer->commit(calibration).status();
  }

  // [tokens, Hq, d]
  std::vector<float> queries(int64_t tokens, uint64_t seed) const {
    std::vector<float> out;
    Random random(options_.seed * 1000003 + seed);
    const int64_t group = options_.query_heads / heads_;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads_; ++h) {
        int64_t centre[kMixture];
        for (int64_t& c : centre) c = random.below(clusters_[0]);
        for (int64_t g = 0; g < group; ++g) append_query(h, centre, random, out);
      }
    }
    return out;
  }

 private:
  void append_query(int64_t head, const int64_t* centre, Random& random,
                    std::vector<float>& out) const {
    float weight[kMixture];
    for (float& w : weight) w = 0.4f + 0.1f * random.normal();
    const float* coarse = layer_.coarse.data() + head * clusters_[0] * dim_;
    for (int64_t i = 0; i < dim_; ++i) {
      float x = 0.3f * random.normal();
      for (int m = 0; m < kMixture; ++m) x += weight[m] * coarse[centre[m] * dim_ + i];
      out.push_back(x);
    }
  }

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
    layer_.coarse.resize(vectors(clusters_[0]));
    (void)parallel_for(heads_, options_.threads, [&](int64_t head) {
      fill_head(head);
      return Status();
    });
  }

  void fill_head(int64_t head) {
    Random random(options_.seed * 7919 + static_cast<uint64_t>(head) + 1);
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

  void fill_noise(std::vector<BFloat16>& out, int64_t head, int64_t count, Random& random) const {
    BFloat16* to = out.data() + head * count * dim_;
    for (int64_t i = 0; i < count * dim_; ++i) to[i] = to_bfloat16(random.normal());
  }

  void fill_keys(int64_t head, const std::vector<uint32_t>& coarse_offsets,
                 const std::vector<uint32_t>& fine_offsets, Random& random) {
    float* coarse = layer_.coarse.data() + head * clusters_[0] * dim_;
    BFloat16* key = layer_.keys.data() + head * slots_ * dim_;
    std::vector<float> fine(static_cast<size_t>(dim_));
    for (int64_t c = 0; c < clusters_[0]; ++c, coarse += dim_) {
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

  Result<Calibration> calibrate_layer() const {
    CalibrationInput input;
    input.layers = 1;
    input.kv_heads = heads_;
    input.group = options_.query_heads / heads_;
    input.dim = dim_;
    input.queries = kCalibrationQueries;
    input.coarse_keep = BuildOptions().coarse_keep;
    input.scale = static_cast<float>(metadata_.model.attention_scale);
    input.source = "made-up queries";
    CalibrationLayer layer;
    for (const Layer::Level& level : layer_.levels) {
      const auto bytes = std::as_bytes(std::span(level.centroids));
      layer.levels.push_back({{bytes.begin(), bytes.end()}, level.offsets});
    }
    // [n, Hq, d] to [Hkv, n, group, d].
    const std::vector<float> made = queries(kCalibrationQueries, 0);
    const int64_t row = input.group * dim_;
    for (int64_t head = 0; head < heads_; ++head) {
      for (int64_t t = 0; t < kCalibrationQueries; ++t) {
        const float* from = made.data() + (t * heads_ + head) * row;
        layer.queries.insert(layer.queries.end(), from, from + row);
      }
    }
    input.sparse.push_back(std::move(layer));
    return calibrate(input, options_.threads);
  }

  const Options& options_;
  IndexMetadata metadata_;
  int64_t slots_;
  std::vector<int64_t> clusters_;
  int64_t dim_, heads_;
  Layer layer_;
};

}  // namespace

Result<std::unique_ptr<TemporaryFile>> TemporaryFile::create(const std::string& directory,
                                                             const std::string& stem) {
  namespace fs = std::filesystem;
  static std::atomic<int> counter{0};
  std::error_code error;
  const fs::path folder = directory.empty() ? fs::temp_directory_path(error) : fs::path(directory);
  if (error || !fs::is_directory(folder, error)) {
    return Status(Code::kNotFound, bad_field("--directory", folder.string(), "no such folder",
                                             "a folder for temporary files"));
  }
  const std::string name = concat(stem, ".", ::getpid(), ".", counter.fetch_add(1), ".sqz");
  return std::unique_ptr<TemporaryFile>(new TemporaryFile((folder / name).string()));
}

TemporaryFile::~TemporaryFile() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

std::vector<int64_t> synthetic_clusters(int64_t tokens, int64_t slots) {
  return cluster_counts(std::vector<double>{0.01, 0.05}, tokens, slots);
}

IndexMetadata synthetic_metadata(const Options& options, int64_t tokens, int64_t layers) {
  IndexMetadata m;
  m.model.architecture = "LlamaForCausalLM";
  m.model.layers = layers;
  m.model.query_heads = options.query_heads;
  m.model.kv_heads = options.kv_heads;
  m.model.head_dim = options.head_dim;
  m.model.hidden_size = options.query_heads * options.head_dim;
  m.model.vocab_size = 128256;
  m.model.max_positions = std::max<int64_t>(tokens, 131072);
  m.model.sliding_window.assign(static_cast<size_t>(layers), 0);
  m.model.weights_hash = "0000000000000000";
  m.model.attention_scale = 1.0 / std::sqrt(static_cast<double>(options.head_dim));
  m.tokens_hash = "0000000000000000";
  m.tokens = tokens;
  m.sink = kSink;
  m.tail = kTail;
  m.levels = 2;
  m.layers.resize(static_cast<size_t>(layers));
  m.build = {{"engine", "sqz-bench"}, {"seed", options.seed}};
  return m;
}

Result<SyntheticIndex> make_synthetic_index(const Options& options, int64_t tokens, int64_t sets,
                                            int64_t query_tokens) {
  SyntheticIndex index;
  SQZ_ASSIGN_OR_RETURN(index.file, TemporaryFile::create(options.directory, "sqz-bench"));
  Maker maker(options, tokens);
  SQZ_RETURN_IF_ERROR(maker.write(index.file->path()));
  for (int64_t set = 0; set < sets; ++set) {
    index.queries.push_back(maker.queries(query_tokens, static_cast<uint64_t>(set) + 1));
  }
  return index;
}

}  // namespace sqz::bench
