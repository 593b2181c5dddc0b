#include "libruntime/select/score.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/sqz_file.h"
#include "libruntime/kernels/cpu/kernels.h"

namespace sqz {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kRowTile = 2 * kLanePad;  // query rows whose logits are held at once
constexpr int64_t kKeyTile = 64;            // centroids at once, for many rows
constexpr int64_t kFewTile = 1024;          // and for few
constexpr int64_t kAhead = 64;              // scattered centroids asked into the cache early

constexpr int64_t kMostNetworkLogits = 1 << 20;  // 4 MB a thread, however many buckets there are

bool has_few_rows(const ScoreProblem& p) {
  return p.network == nullptr && p.tokens * p.group <= kFewRows;
}

int64_t row_tile(const ScoreProblem& p) {
  if (p.network != nullptr) {
    return std::clamp<int64_t>(kMostNetworkLogits / std::max<int64_t>(p.clusters, 1), 1, kLanePad);
  }
  return has_few_rows(p) ? p.tokens * p.group : kRowTile;
}

// The workspace, cut up. Lengths in floats.
struct Buffers {
  float* weights;  // [n16]        N_j; 0 in the padding
  float* maximum;  // [n16]
  float* sum;      // [n16]
  float* logits;   // [tile, n16]
  float* queries;  // few rows: packed [rows, d32]; many: transposed [d, lanes]
  float* rows;     // [kRowTile, d] gathered queries
  float* keys;     // [kKeyTile, d32], many rows only
  float* tile;     // [kKeyTile, lanes], many rows only
  float* hidden;   // [H, lanes] of a network
  float* sums;     // [kRowTile] log of equation 2's sum, of the rows at hand
};

int64_t cut(const ScoreProblem& p, float* base, Buffers* buffers) {
  const int64_t n16 = round_up(p.clusters, kLanePad);
  const int64_t d32 = padded_dim(p.dim);
  const int64_t rows = row_tile(p);
  const bool few = has_few_rows(p);
  int64_t used = 0;
  const auto take = [&](int64_t count) {
    float* at = base == nullptr ? nullptr : base + used;
    used += round_up(count, kLanePad);
    return at;
  };
  Buffers b{};
  b.weights = take(n16);
  b.maximum = take(n16);
  b.sum = take(n16);
  b.logits = take(rows * n16);
  b.queries = take(d32 * kRowTile);
  b.rows = take(d32 * kRowTile);
  b.keys = take(few ? 0 : kKeyTile * d32);
  b.tile = take(few ? 0 : kKeyTile * kRowTile);
  b.hidden = take(p.network == nullptr ? 0 : p.network->hidden * kLanePad);
  b.sums = take(kRowTile);
  if (buffers != nullptr) *buffers = b;
  return used;
}

class Scorer {
 public:
  Scorer(const ScoreProblem& problem, std::span<float> workspace)
      : p_(problem),
        k_(problem.kernels != nullptr ? *problem.kernels : cpu_kernels()),
        n16_(round_up(problem.clusters, kLanePad)) {
    cut(p_, workspace.data(), &b_);
  }

  Status run(std::span<float> scores) {
    const int64_t rows = p_.tokens * p_.group;
    weigh_sizes();
    std::fill(b_.maximum, b_.maximum + n16_, kLowest);
    std::fill(b_.sum, b_.sum + n16_, 0.0f);
    const int64_t at_once = row_tile(p_);
    for (int64_t first = 0; first < rows; first += at_once) {
      const int64_t count = std::min(at_once, rows - first);
      for (int64_t i = 0; i < count; ++i) gather(i, first + i);
      SQZ_RETURN_IF_ERROR(add_rows(count));
    }
    k_.finish_mean(b_.maximum, b_.sum, p_.clusters, std::log(static_cast<float>(rows)),
                   scores.data());
    return {};
  }

 private:
  void weigh_sizes() {
    for (int64_t j = 0; j < p_.clusters; ++j) b_.weights[j] = static_cast<float>(p_.sizes[j]);
    std::fill(b_.weights + p_.clusters, b_.weights + n16_, 0.0f);
    some_empty_ = std::count(p_.sizes, p_.sizes + p_.clusters, uint32_t{0}) > 0;
  }

  // The log of a sum of exponentials, as kNumeric if a logit was none.
  static Result<float> checked(float log_sum) {
    if (std::isnan(log_sum) || log_sum == kInfinity) {
      return Status(Code::kNumeric, "the product of a query and a centroid is NaN or infinite");
    }
    return log_sum;
  }

  void gather(int64_t i, int64_t row) {
    const int64_t stride = p_.token_stride != 0 ? p_.token_stride : p_.group * p_.dim;
    const float* from = p_.queries + row / p_.group * stride + row % p_.group * p_.dim;
    std::copy(from, from + p_.dim, b_.rows + i * p_.dim);
  }

  // f(first, place, count) for each range; place: of its first cluster among the alive ones.
  template <class Function>
  void for_each_range(const Function& f) const {
    int64_t place = 0;
    for (const ClusterRange& range : p_.ranges) {
      f(range.first, place, range.count);
      place += range.count;
    }
  }

  const void* centroid(int64_t j) const {
    return static_cast<const char*>(p_.centroids) + j * p_.dim * dtype_size(p_.dtype);
  }

  void few_logits(int64_t rows) {
    const bool bf16 = k_.pack_bf16 != nullptr && p_.dtype == DType::kBF16 &&
                      k_.pack_bf16(b_.rows, p_.dim, rows, p_.dim, b_.queries);
    if (!bf16) k_.pack(p_.dtype, b_.rows, p_.dim, rows, p_.dim, b_.queries);
    const void* centroids[kFewTile];
    const int64_t row_bytes = p_.dim * dtype_size(p_.dtype);
    int64_t filled = 0, place = 0;
    const auto flush = [&] {
      float* out = b_.logits + place;
      const Ahead early = {p_.ranges.size() > 1 ? kAhead : 0, filled};
      if (bf16) {
        k_.dots_bf16(b_.queries, rows, centroids, filled, p_.dim, out, n16_, early);
      } else {
        k_.dots(p_.dtype, b_.queries, rows, centroids, filled, p_.dim, out, n16_, early);
      }
      place += filled;
      filled = 0;
    };
    for_each_range([&](int64_t first, int64_t, int64_t count) {
      const auto* next = static_cast<const char*>(centroid(first));
      for (int64_t i = 0; i < count; ++i, next += row_bytes) {
        centroids[filled++] = next;
        if (filled == kFewTile) flush();
      }
    });
    if (filled > 0) flush();
  }

  // Queries as columns, `lanes` apart.
  void transpose(int64_t rows, int64_t lanes) {
    for (int64_t c = 0; c < p_.dim; ++c) {
      for (int64_t r = 0; r < lanes; ++r) {
        b_.queries[c * lanes + r] = r < rows ? b_.rows[r * p_.dim + c] : 0.0f;
      }
    }
  }

  // The tile's logits, [count, lanes], as rows of logits from `place` on.
  void store_tile(int64_t rows, int64_t lanes, int64_t place, int64_t count) {
    for (int64_t r = 0; r < rows; ++r) {
      float* out = b_.logits + r * n16_ + place;
      for (int64_t j = 0; j < count; ++j) out[j] = b_.tile[j * lanes + r];
    }
  }

  void many_logits(int64_t rows) {
    transpose(rows, kRowTile);
    for_each_range([&](int64_t first, int64_t place, int64_t total) {
      for (int64_t done = 0; done < total; done += kKeyTile) {
        const int64_t count = std::min(kKeyTile, total - done);
        k_.to_float(p_.dtype, centroid(first + done), count, p_.dim, b_.keys);
        k_.multiply(b_.keys, padded_dim(p_.dim), 1, b_.queries, b_.tile, count, p_.dim, kRowTile,
                    false);
        store_tile(rows, kRowTile, place + done, count);
      }
    });
  }

  void network_logits(int64_t rows) {
    const ClassifierView& n = *p_.network;
    transpose(rows, kLanePad);
    k_.multiply(n.hidden_weight, p_.dim, 1, b_.queries, b_.hidden, n.hidden, p_.dim, kLanePad,
                false);
    for (int64_t i = 0; i < n.hidden * kLanePad; ++i) {
      const float x = b_.hidden[i] + n.hidden_bias[i / kLanePad];
      b_.hidden[i] = x < 0 ? 0 : x;  // a NaN stays
    }
    for (int64_t first = 0; first < p_.clusters; first += kKeyTile) {
      const int64_t count = std::min(kKeyTile, p_.clusters - first);
      k_.multiply(n.output_weight + first * n.hidden, n.hidden, 1, b_.hidden, b_.tile, count,
                  n.hidden, kLanePad, false);
      for (int64_t i = 0; i < count * kLanePad; ++i) {
        b_.tile[i] += n.output_bias[first + i / kLanePad];
      }
      store_tile(rows, kLanePad, first, count);
    }
  }

  Status add_rows(int64_t rows) {
    if (p_.network != nullptr) {
      network_logits(rows);
    } else if (has_few_rows(p_)) {
      few_logits(rows);
    } else {
      many_logits(rows);
    }
    float* lse = b_.sums;
    for (int64_t r = 0; r < rows; ++r) {
      float* logits = b_.logits + r * n16_;
      std::fill(logits + p_.clusters, logits + n16_, -kInfinity);
      if (some_empty_) silence_empty(logits);
      SQZ_ASSIGN_OR_RETURN(lse[r], checked(k_.log_sum_exp(logits, b_.weights, n16_, p_.scale)));
      // No keys at all: every score stays -infinity, and must not become -inf - -inf.
      if (lse[r] == -kInfinity) lse[r] = 0.0f;
    }
    k_.add_rows(b_.logits, n16_, lse, rows, n16_, b_.maximum, b_.sum);
    return {};
  }

  // The centroid of an empty cluster may be anything.
  void silence_empty(float* logits) const {
    for (int64_t j = 0; j < p_.clusters; ++j) {
      if (p_.sizes[j] == 0) logits[j] = -kInfinity;
    }
  }

  const ScoreProblem& p_;
  const CpuKernels& k_;
  int64_t n16_;
  bool some_empty_ = false;
  Buffers b_{};
};

}  // namespace

Candidates children_of_chosen(std::span<const ClusterRange> parents,
                              std::span<const uint8_t> chosen, const uint32_t* offsets,
                              const uint32_t* child_sizes, std::span<ClusterRange> ranges,
                              std::span<uint32_t> sizes) {
  size_t used = 0;
  for_each_chosen(parents, chosen, [&](size_t, uint32_t parent) {
    const uint32_t first = offsets[parent], count = offsets[parent + 1] - first;
    if (count == 0) return;
    if (used > 0 && ranges[used - 1].first + ranges[used - 1].count == first) {
      ranges[used - 1].count += count;
    } else {
      ranges[used++] = {first, count};
    }
  });
  auto end = sizes.begin();
  for (const ClusterRange& range : ranges.first(used)) {
    end = std::copy_n(child_sizes + range.first, range.count, end);
  }
  return {ranges.first(used), {sizes.begin(), end}};
}

int64_t score_workspace(const ScoreProblem& problem) {
  return cut(problem, nullptr, nullptr);
}

int64_t most_score_workspace(ScoreProblem problem) {
  problem.tokens = 1;
  const int64_t few = score_workspace(problem);
  problem.tokens = kFewRows + 1;
  return std::max(few, score_workspace(problem));
}

Status score_clusters(const ScoreProblem& problem, std::span<float> scores,
                      std::span<float> workspace) {
  return Scorer(problem, workspace).run(scores.first(static_cast<size_t>(problem.clusters)));
}

}  // namespace sqz
