// What is in indexes for timing: keys, values, clusters, pages, buckets, and queries.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "formats/base/parallel.h"
#include "formats/qmodel_file.h"
#include "formats/sqz_layout.h"
#include "libindex/layer_store.h"
#include "tools/sqz_bench/made_index.h"

namespace sqz::bench {
namespace {

constexpr int64_t kPageSize = 16;
constexpr int64_t kCalibrationQueries = 32;
constexpr int kMixture = 4;  // coarse centres in a query
constexpr uint64_t kSeedStep = 1000003;

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

// [tokens, Hkv * group, d] by centres [Hkv, n, d].
std::vector<float> mixtures(const std::vector<float>& centres, int64_t heads, int64_t group,
                            int64_t dim, int64_t tokens, uint64_t seed) {
  std::vector<float> out;
  Random random(seed);
  const int64_t clusters = std::ssize(centres) / (heads * dim);
  for (int64_t row = 0; row < tokens * heads; ++row) {
    const float* chosen[kMixture];
    for (const float*& c : chosen) {
      c = centres.data() + (row % heads * clusters + random.below(clusters)) * dim;
    }
    for (int64_t g = 0; g < group; ++g) {
      float weight[kMixture];
      for (float& w : weight) w = 0.4f + 0.1f * random.normal();
      for (int64_t i = 0; i < dim; ++i) {
        float x = 0.3f * random.normal();
        for (int m = 0; m < kMixture; ++m) x += weight[m] * chosen[m][i];
        out.push_back(x);
      }
    }
  }
  return out;
}

std::vector<float> coarse_centroids(const void* data, size_t count, DType dtype) {
  std::vector<float> out(count);
  for (size_t i = 0; i < count; ++i) {
    out[i] = dtype == DType::kF16 ? to_float(static_cast<const Float16*>(data)[i])
                                  : to_float(static_cast<const BFloat16*>(data)[i]);
  }
  return out;
}

// The layer of an index, in bfloat16.
class LayerMaker {
 public:
  LayerMaker(const Options& options, int64_t tokens)
      : options_(options),
        metadata_(made_metadata(options, tokens, 1)),
        heads_(options.kv_heads),
        dim_(options.head_dim),
        slots_(tokens - kSink - kTail),
        store_(heads_, tokens, dim_, DType::kBF16) {
    if (options.selector == "squeezed") return;
    const bool pages = options.selector == "quest";
    metadata_.partition = pages ? Partition::kPages : Partition::kBuckets;
    metadata_.levels = 0;
    metadata_.has_value_means = false;
    metadata_.page_size = pages ? kPageSize : 0;
    metadata_.buckets = pages ? 0 : options.buckets;
    metadata_.hidden = pages ? 0 : options.hidden;
  }

  Status write(const std::string& path) {
    resize();
    SQZ_RETURN_IF_ERROR(parallel_for(heads_, options_.threads, [&](int64_t head) {
      fill_head(head);
      return Status();
    }));
    LayerData data = store_.data();
    data.page_min = page_min_;
    data.page_max = page_max_;
    data.bucket_offsets = bucket_offsets_;
    data.classifier = &classifier_;
    std::vector<float> queries;
    if (!clusters_.empty()) {
      const std::vector<float> centres =
          coarse_centroids(layer_.levels[0].centroids.data(),
                           static_cast<size_t>(heads_ * clusters_[0] * dim_), DType::kBF16);
      queries = mixtures(centres, heads_, options_.query_heads / heads_, dim_, kCalibrationQueries,
                         options_.seed * kSeedStep);
    }
    return write_index(path, options_, metadata_, data, queries);
  }

 private:
  using Bytes = std::vector<std::byte>;

  void resize() {
    if (metadata_.levels > 0) clusters_ = made_clusters(options_, metadata_.tokens, slots_);
    layer_.resize(heads_, dim_, clusters_, slots_, kSink + kTail, true);
    if (metadata_.page_size > 0) {
      page_min_.resize(static_cast<size_t>(heads_ * page_count(slots_, kPageSize) * dim_ * 2));
      page_max_.resize(page_min_.size());
    }
    if (metadata_.buckets == 0) return;
    const auto count = [&](int64_t each) { return static_cast<size_t>(heads_ * each); };
    bucket_offsets_.resize(count(options_.buckets + 1));
    classifier_.centroids.resize(count(options_.buckets * dim_));
    classifier_.hidden_weight.resize(count(options_.hidden * dim_));
    classifier_.hidden_bias.resize(count(options_.hidden));
    classifier_.output_weight.resize(count(options_.buckets * options_.hidden));
    classifier_.output_bias.resize(count(options_.buckets));
  }

  void fill_head(int64_t head) {
    Random random(options_.seed * 7919 + static_cast<uint64_t>(head) + 1);
    uint32_t* positions = layer_.positions.data() + head * slots_;
    std::iota(positions, positions + slots_, static_cast<uint32_t>(kSink));
    if (!clusters_.empty()) {
      fill_clusters(head, random);
    } else {
      for (Bytes* rows : {&layer_.keys, &layer_.values}) fill_noise(*rows, head, slots_, random);
      fill_exact(head, random);
    }
    if (metadata_.page_size > 0) return fill_pages(head);  // in token order
    if (metadata_.buckets > 0) fill_buckets(head, random);
    for (int64_t i = slots_ - 1; i > 0; --i)
      std::swap(positions[i], positions[random.below(i + 1)]);
  }

  BFloat16* rows_of(Bytes& all, int64_t head, int64_t rows) const {
    return reinterpret_cast<BFloat16*>(all.data()) + head * rows * dim_;
  }

  void fill_noise(Bytes& all, int64_t head, int64_t rows, Random& random) const {
    BFloat16* to = rows_of(all, head, rows);
    for (int64_t i = 0; i < rows * dim_; ++i) to[i] = to_bfloat16(random.normal());
  }

  void fill_exact(int64_t head, Random& random) {
    for (Bytes* rows : {&layer_.exact_keys, &layer_.exact_values}) {
      fill_noise(*rows, head, kSink + kTail, random);
    }
  }

  void fill_clusters(int64_t head, Random& random) {
    const auto coarse_offsets = random_offsets(clusters_[0], clusters_[1], random);
    const auto fine_offsets = random_offsets(clusters_[1], slots_, random);
    std::copy(coarse_offsets.begin(), coarse_offsets.end(),
              layer_.levels[0].offsets.begin() + head * (clusters_[0] + 1));
    std::copy(fine_offsets.begin(), fine_offsets.end(),
              layer_.levels[1].offsets.begin() + head * (clusters_[1] + 1));
    fill_exact(head, random);
    fill_noise(layer_.values, head, slots_, random);
    BFloat16* key = rows_of(layer_.keys, head, slots_);
    std::vector<float> coarse(static_cast<size_t>(dim_)), fine(coarse.size());
    for (int64_t c = 0; c < clusters_[0]; ++c) {
      for (float& x : coarse) x = random.normal();
      for (uint32_t f = coarse_offsets[c]; f < coarse_offsets[c + 1]; ++f) {
        for (int64_t i = 0; i < dim_; ++i) fine[i] = coarse[i] + 0.6f * random.normal();
        for (uint32_t slot = fine_offsets[f]; slot < fine_offsets[f + 1]; ++slot) {
          for (const float x : fine) *key++ = to_bfloat16(x + 0.6f * random.normal());
        }
      }
    }
    LayerBuffers::Level &top = layer_.levels[0], &bottom = layer_.levels[1];
    fill_means(layer_.keys, top.centroids, bottom.centroids, head, coarse_offsets, fine_offsets);
    fill_means(layer_.values, top.value_means, bottom.value_means, head, coarse_offsets,
               fine_offsets);
  }

  // Means of the stored vectors below each cluster, at both levels.
  void fill_means(Bytes& vectors, Bytes& coarse_means, Bytes& fine_means, int64_t head,
                  const std::vector<uint32_t>& coarse_offsets,
                  const std::vector<uint32_t>& fine_offsets) const {
    const BFloat16* vector = rows_of(vectors, head, slots_);
    BFloat16* to_coarse = rows_of(coarse_means, head, clusters_[0]);
    BFloat16* to_fine = rows_of(fine_means, head, clusters_[1]);
    std::vector<float> fine(static_cast<size_t>(dim_)), coarse(fine.size());
    for (int64_t c = 0; c < clusters_[0]; ++c) {
      std::fill(coarse.begin(), coarse.end(), 0.0f);
      for (uint32_t f = coarse_offsets[c]; f < coarse_offsets[c + 1]; ++f) {
        std::fill(fine.begin(), fine.end(), 0.0f);
        for (uint32_t slot = fine_offsets[f]; slot < fine_offsets[f + 1]; ++slot) {
          for (float& x : fine) x += to_float(*vector++);
        }
        const auto size = static_cast<float>(fine_offsets[f + 1] - fine_offsets[f]);
        for (const float x : fine) *to_fine++ = to_bfloat16(x / size);
        for (int64_t i = 0; i < dim_; ++i) coarse[i] += fine[i];
      }
      const auto size =
          static_cast<float>(fine_offsets[coarse_offsets[c + 1]] - fine_offsets[coarse_offsets[c]]);
      for (const float x : coarse) *to_coarse++ = to_bfloat16(x / size);
    }
  }

  void fill_pages(int64_t head) {
    const int64_t pages = page_count(slots_, kPageSize);
    const BFloat16* keys = rows_of(layer_.keys, head, slots_);
    BFloat16 *min = rows_of(page_min_, head, pages), *max = rows_of(page_max_, head, pages);
    const auto less = [](BFloat16 a, BFloat16 b) { return to_float(a) < to_float(b); };
    for (int64_t slot = 0; slot < slots_; ++slot) {
      for (int64_t i = 0; i < dim_; ++i) {
        const int64_t at = slot / kPageSize * dim_ + i;
        const BFloat16 x = keys[slot * dim_ + i];
        const bool first = slot % kPageSize == 0;
        min[at] = first ? x : std::min(min[at], x, less);
        max[at] = first ? x : std::max(max[at], x, less);
      }
    }
  }

  void fill_buckets(int64_t head, Random& random) {
    const auto fill = [&](std::vector<float>& all, double scale) {
      const int64_t count = std::ssize(all) / heads_;
      float* to = all.data() + head * count;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(scale) * random.normal();
    };
    fill(classifier_.centroids, 1 / std::sqrt(dim_));
    fill(classifier_.hidden_weight, 1 / std::sqrt(dim_));
    fill(classifier_.hidden_bias, 0.1);
    fill(classifier_.output_weight, 2 / std::sqrt(options_.hidden));
    fill(classifier_.output_bias, 0.1);
    const auto offsets = random_offsets(options_.buckets, slots_, random);
    std::copy(offsets.begin(), offsets.end(),
              bucket_offsets_.begin() + head * (options_.buckets + 1));
  }

  const Options& options_;
  IndexMetadata metadata_;
  int64_t heads_, dim_, slots_;
  std::vector<int64_t> clusters_;  // none of saap and quest
  LayerStore store_;
  LayerBuffers& layer_ = store_.buffers();
  Bytes page_min_, page_max_;             // [Hkv, P, d]
  std::vector<uint32_t> bucket_offsets_;  // [Hkv, C + 1]
  QmodelLayer classifier_;
};

}  // namespace

Result<std::shared_ptr<const IndexFile>> make_index(const Options& options, int64_t tokens) {
  const int64_t slots = tokens - kSink - kTail;
  if (options.selector == "saap" && options.buckets > slots) {
    return Status(Code::kInvalidArgument,
                  bad_field("options", "--buckets", concat(options.buckets),
                            concat("at most the ", slots, " clustered keys")));
  }
  SQZ_ASSIGN_OR_RETURN(auto file, IndexFile::create(options));
  SQZ_RETURN_IF_ERROR(LayerMaker(options, tokens).write(file->path()));
  return file;
}

std::vector<std::vector<float>> make_queries(const SqzFile& file, const Options& options,
                                             int64_t sets, int64_t tokens) {
  const ModelDescription& model = file.metadata().model;
  std::vector<std::vector<float>> out(static_cast<size_t>(sets));
  if (options.selector != "squeezed") {
    Random random(options.seed * 31 + 17);
    for (auto& set : out) {
      set.resize(static_cast<size_t>(tokens * model.query_heads * model.head_dim));
      for (float& x : set) x = random.normal();
    }
    return out;
  }
  const LayerView view = file.layer(0);
  const std::vector<float> centres = coarse_centroids(
      view.level[0].centroids,
      static_cast<size_t>(view.kv_heads * view.level[0].clusters * view.head_dim), view.dtype);
  uint64_t seed = options.seed * kSeedStep;
  for (auto& set : out) {
    set = mixtures(centres, view.kv_heads, model.group_size(), view.head_dim, tokens, ++seed);
  }
  return out;
}

}  // namespace sqz::bench
