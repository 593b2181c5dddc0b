// The work of libruntime, written as plainly as possible in double precision: no tiles, no layouts,
// no tricks. Tests compare the library with this.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "formats/base/dtype.h"
#include "formats/sqz_file.h"
#include "libruntime/select/score.h"

namespace sqz::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Element i of an array of BF16, F16 or F32.
inline double element(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::kBF16:
      return to_float(static_cast<const BFloat16*>(data)[i]);
    case DType::kF16:
      return to_float(static_cast<const Float16*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

inline double dot(const float* q, DType dtype, const void* keys, int64_t row, int64_t dim) {
  double sum = 0;
  for (int64_t c = 0; c < dim; ++c) sum += double{q[c]} * element(dtype, keys, row * dim + c);
  return sum;
}

// log of the combined S_i (select/score.h), one query head at a time, straight from equation 1. p
// is of all clusters; -infinity for those that are not alive.
inline std::vector<double> scores(const ScoreProblem& p, const std::vector<uint8_t>& alive) {
  const int64_t n = p.clusters;
  const auto scored = [&](int64_t j) { return p.sizes[j] != 0 && alive[j] != 0; };
  std::vector<double> combined(n, 0.0);
  for (int64_t g = 0; g < p.group; ++g) {
    for (int64_t t = 0; t < p.tokens; ++t) {
      const float* q = p.queries + (t * p.group + g) * p.dim;
      std::vector<double> logit(n, -kInfinity);
      double top = -kInfinity;
      for (int64_t j = 0; j < n; ++j) {
        if (!scored(j)) continue;
        logit[j] = p.scale * dot(q, p.dtype, p.centroids, j, p.dim);
        top = std::max(top, logit[j]);
      }
      double denominator = 0;
      for (int64_t j = 0; j < n; ++j) {
        if (scored(j)) denominator += p.sizes[j] * std::exp(logit[j] - top);
      }
      for (int64_t j = 0; j < n; ++j) {
        if (!scored(j)) continue;
        combined[j] +=
            std::exp(logit[j] - top) / denominator / static_cast<double>(p.tokens * p.group);
      }
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    combined[j] = scored(j) ? std::log(combined[j]) : -kInfinity;
  }
  return combined;
}

// ---- Selection of one block of query tokens in one KV head.

struct SelectParameters {
  int levels = 1;  // in use, the finest ones
  bool budget_rule = false;
  std::vector<double> log_thresholds;  // [levels]
  double share = 0;                    // budget rule: fraction of the head's keys
};

struct Cluster {
  int level = 0;  // index into LayerView::level
  int64_t index = 0;
};

struct Selected {
  std::vector<bool> slots;    // [M]
  int64_t centroids = 0;      // scored
  double margin = kInfinity;  // how close the nearest decision was, in log S
};

// The first slot below cluster `index` of `level`; of index n_k: M.
inline int64_t first_slot(const LayerView& view, int64_t head, int level, int64_t index) {
  for (; level < view.levels; ++level) {
    index = view.level[level].offsets[head * (view.level[level].clusters + 1) + index];
  }
  return index;
}

inline int64_t keys_below(const LayerView& view, int64_t head, const Cluster& c) {
  return first_slot(view, head, c.level, c.index + 1) - first_slot(view, head, c.level, c.index);
}

// queries: [tokens, group, d].
inline Selected select(const LayerView& view, int64_t head, const std::vector<float>& queries,
                       int64_t tokens, int64_t group, double scale, const SelectParameters& p) {
  Selected out;
  out.slots.assign(view.slots, false);
  const int first = view.levels - p.levels;
  std::vector<uint8_t> alive(view.level[first].clusters, 1);
  for (int level = first; level < view.levels; ++level) {
    const LevelView& v = view.level[level];
    const bool finest = level + 1 == view.levels;
    std::vector<uint32_t> sizes;
    for (int64_t i = 0; i < v.clusters; ++i) {
      sizes.push_back(static_cast<uint32_t>(keys_below(view, head, {level, i})));
    }
    ScoreProblem problem;
    problem.dtype = view.dtype;
    problem.dim = view.head_dim;
    problem.clusters = v.clusters;
    problem.centroids = static_cast<const std::byte*>(v.centroids) +
                        head * v.clusters * view.head_dim * dtype_size(view.dtype);
    problem.sizes = sizes.data();
    problem.queries = queries.data();
    problem.tokens = tokens;
    problem.group = group;
    problem.scale = static_cast<float>(scale);
    const std::vector<double> score = scores(problem, alive);
    out.centroids += std::count(alive.begin(), alive.end(), 1);

    std::vector<int64_t> ranked;
    for (int64_t i = 0; i < v.clusters; ++i) {
      if (std::isfinite(score[i])) ranked.push_back(i);
    }
    std::stable_sort(ranked.begin(), ranked.end(),
                     [&](int64_t a, int64_t b) { return score[a] > score[b]; });
    std::vector<bool> kept(v.clusters, false);
    int64_t keys = 0;
    // Best first: until `wanted` keys are there, or as near to it as can be.
    const auto keep_best = [&](int64_t wanted, bool reach) {
      kept.assign(v.clusters, false);
      keys = 0;
      const auto takes = [&](int64_t before, int64_t with) {
        return reach ? before < wanted : with - wanted < wanted - before;
      };
      for (size_t r = 0; r < ranked.size(); ++r) {
        const int64_t with = keys + sizes[ranked[r]];
        const bool ends = !takes(keys, with);
        // The order of two neighbours matters at the end, where the one before would not be taken
        // as the second, and where the one behind would be taken as the first.
        const auto behind = static_cast<int64_t>(r + 1);
        const bool next = ends && behind < std::ssize(ranked);
        if (next && takes(keys, keys + sizes[ranked[behind]])) {
          out.margin = std::min(out.margin, score[ranked[r]] - score[ranked[behind]]);
        }
        if (r > 0 && (ends || !takes(with - sizes[ranked[r - 1]], with))) {
          out.margin = std::min(out.margin, score[ranked[r - 1]] - score[ranked[r]]);
        }
        if (ends) break;
        kept[ranked[r]] = true;
        keys = with;
      }
    };
    if (!p.budget_rule || !finest) {
      const double log_threshold = p.log_thresholds[level - first];
      for (const int64_t i : ranked) {
        kept[i] = score[i] >= log_threshold;
        if (kept[i]) keys += sizes[i];
        out.margin = std::min(out.margin, std::abs(score[i] - log_threshold));
      }
    }
    const auto part = [&](double share) {
      const double exact = share * static_cast<double>(view.slots);
      out.margin = std::min(out.margin, 2 * std::abs(exact - std::floor(exact) - 0.5));  // of 0.5
      return std::llround(exact);
    };
    if (p.budget_rule && (finest || keys < part(p.share))) keep_best(part(p.share), !finest);

    std::vector<uint8_t> next(finest ? 0 : view.level[level + 1].clusters, 0);
    const uint32_t* offsets = v.offsets + head * (v.clusters + 1);
    for (int64_t i = 0; i < v.clusters; ++i) {
      if (alive[i] == 0) continue;
      if (!kept[i]) continue;
      for (uint32_t child = offsets[i]; child < offsets[i + 1]; ++child) {
        if (finest) {
          out.slots[child] = true;
        } else {
          next[child] = 1;
        }
      }
    }
    alive = next;
  }
  return out;
}

// ---- Pages (selector `quest`).

// sum over c of max(q_c min_c, q_c max_c) of each query and page, with the range of the page's
// keys; means over the queries [tokens, group, d].
inline std::vector<double> page_bounds(const LayerView& view, int64_t head,
                                       const std::vector<float>& queries, int64_t tokens,
                                       int64_t group) {
  std::vector<double> out(static_cast<size_t>(view.pages));
  for (int64_t page = 0; page < view.pages; ++page) {
    const int64_t first = page * view.page_size;
    const int64_t end = std::min(first + view.page_size, view.slots);
    for (int64_t c = 0; c < view.head_dim; ++c) {
      double least = kInfinity, greatest = -kInfinity;
      for (int64_t slot = head * view.slots + first; slot < head * view.slots + end; ++slot) {
        const double x = element(view.dtype, view.keys, slot * view.head_dim + c);
        least = std::min(least, x);
        greatest = std::max(greatest, x);
      }
      for (int64_t row = 0; row < tokens * group; ++row) {
        const float q = queries[row * view.head_dim + c];
        out[page] += std::max(q * least, q * greatest) / static_cast<double>(tokens * group);
      }
    }
  }
  return out;
}

// The slots of the `count` best pages; lower numbers first among equals.
inline Selected best_pages(const LayerView& view, const std::vector<double>& bounds,
                           int64_t count) {
  std::vector<int64_t> ranked(bounds.size());
  for (size_t i = 0; i < ranked.size(); ++i) ranked[i] = static_cast<int64_t>(i);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [&](int64_t a, int64_t b) { return bounds[a] > bounds[b]; });
  Selected out;
  out.slots.assign(view.slots, false);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = ranked[i] * view.page_size;
    for (int64_t s = first; s < std::min(first + view.page_size, view.slots); ++s) {
      out.slots[s] = true;
    }
  }
  if (count < std::ssize(ranked)) out.margin = bounds[ranked[count - 1]] - bounds[ranked[count]];
  return out;
}

// ---- Attention of one query row.

struct State {
  std::vector<double> out;  // [dv]
  double lse = -kInfinity;
  std::vector<double> weights;  // of the keys, as they were added
};

// One key after the other: logit, weight.
class Attention {
 public:
  Attention(const float* q, const LayerView& view, double scale)
      : q_(q),
        view_(view),
        values_dim_(view.value_dim > 0 ? view.value_dim : view.head_dim),
        scale_(scale) {}

  // Key and value are rows of arrays like LayerView's.
  void add(const void* keys, const void* values, int64_t row) {
    logits_.push_back(scale_ * dot(q_, view_.dtype, keys, row, view_.head_dim));
    values_.push_back({values, row});
  }

  State state() const {
    State state{std::vector<double>(values_dim_, 0.0), -kInfinity, {}};
    if (logits_.empty()) return state;
    const double top = *std::max_element(logits_.begin(), logits_.end());
    double denominator = 0;
    for (size_t j = 0; j < logits_.size(); ++j) {
      const double weight = std::exp(logits_[j] - top);
      denominator += weight;
      state.weights.push_back(weight);
      const auto& [values, row] = values_[j];
      for (int64_t c = 0; c < values_dim_; ++c) {
        state.out[c] += weight * element(view_.dtype, values, row * values_dim_ + c);
      }
    }
    for (auto* numbers : {&state.out, &state.weights}) {
      for (double& x : *numbers) x /= denominator;
    }
    state.lse = top + std::log(denominator);
    return state;
  }

 private:
  const float* q_;
  const LayerView& view_;
  int64_t values_dim_;
  double scale_;
  std::vector<double> logits_;
  std::vector<std::pair<const void*, int64_t>> values_;  // an array and a row of it
};

// Exact keys from `first_exact` on, and the selected slots.
inline State attend(const float* q, const LayerView& view, int64_t head, double scale,
                    const Selected& selected, int64_t first_exact = 0) {
  Attention attention(q, view, scale);
  for (int64_t i = first_exact; i < view.exact; ++i) {
    attention.add(view.exact_keys, view.exact_values, head * view.exact + i);
  }
  for (int64_t i = 0; i < view.slots; ++i) {
    if (selected.slots[i]) attention.add(view.keys, view.values, head * view.slots + i);
  }
  return attention.state();
}

}  // namespace sqz::reference
