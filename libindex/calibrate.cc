#include "libindex/calibrate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <span>

#include "libindex/order.h"
#include "libindex/parallel.h"
#include "libindex/quantile.h"
#include "libruntime/select/score.h"

namespace sqz {
namespace {

constexpr int kScopes = Calibration::kScopes, kGroups = Calibration::kGroups;
constexpr Group kPolicies[kGroups] = {Group::kMean, Group::kMax, Group::kAny};

// One sketch for each (scope, group policy).
using Sketches = std::array<std::array<ScoreSketch, kGroups>, kScopes>;

// With one token, max over heads of a mean over tokens is the max over both.
bool is_copy(int scope, int group) {
  return scope == 0 && kPolicies[group] == Group::kAny;
}

// One KV head of one sparse layer, ready to be scored.
class Head {
 public:
  Head(const CalibrationInput& input, const CalibrationLayer& layer, int64_t head)
      : input_(input), queries_(layer.queries.data() + head * input.queries * query_floats()) {
    for (const CalibrationLayer::Level& level : layer.levels) {
      const int64_t stride = static_cast<int64_t>(level.children.size()) / input.kv_heads;
      const auto first = level.children.begin() + head * stride;
      children_.emplace_back(first, first + stride);
      centroids_.push_back(level.centroids.data() +
                           head * (stride - 1) * input.dim * dtype_size(input.dtype));
    }
    const std::vector<std::vector<uint32_t>> slots = first_slots(children_);
    for (const std::vector<uint32_t>& first : slots) {
      std::vector<uint32_t>& sizes = sizes_.emplace_back(first.size() - 1);
      for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = first[i + 1] - first[i];
      scores_.emplace_back(sizes.size());
      alive_.emplace_back(sizes.size());
    }
    keys_ = slots.front().back();
  }

  int levels() const { return static_cast<int>(sizes_.size()); }
  // Scores level `k` (0-based), all of it or the alive clusters only.
  Status score(int k, bool only_alive, const CalibrationUnit& unit, Group policy) {
    ScoreProblem problem;
    problem.dtype = input_.dtype;
    problem.dim = input_.dim;
    problem.clusters = static_cast<int64_t>(sizes_[k].size());
    problem.centroids = centroids_[k];
    problem.sizes = sizes_[k].data();
    problem.alive = only_alive ? alive_[k].data() : nullptr;
    problem.queries = queries_ + unit.first * query_floats();
    problem.tokens = unit.count;
    problem.group = input_.group;
    problem.scale = input_.scale;
    problem.policy = policy;
    workspace_.resize(std::max(workspace_.size(), static_cast<size_t>(score_workspace(problem))));
    return score_clusters(problem, scores_[k], workspace_);
  }

  // Children of the alive clusters of level `k` with score >= threshold become alive.
  void descend(int k, float threshold) {
    std::fill(alive_[k + 1].begin(), alive_[k + 1].end(), uint8_t{0});
    for (size_t i = 0; i < sizes_[k].size(); ++i) {
      if (!(scores_[k][i] >= threshold)) continue;  // dead clusters score -infinity
      std::fill(alive_[k + 1].begin() + children_[k][i],
                alive_[k + 1].begin() + children_[k][i + 1], uint8_t{1});
    }
  }

  void record(int k, bool only_alive, ScoreSketch& sketch) const {
    uint64_t scored = 0;
    for (size_t i = 0; i < sizes_[k].size(); ++i) {
      if (only_alive && alive_[k][i] == 0) continue;
      sketch.add(scores_[k][i], sizes_[k][i]);
      scored += sizes_[k][i];
    }
    sketch.add_dropped(keys_ - scored);
  }

 private:
  int64_t query_floats() const { return input_.group * input_.dim; }

  const CalibrationInput& input_;
  const float* queries_;                         // [n, group, d]
  std::vector<const std::byte*> centroids_;      // per level: [n_k, d]
  std::vector<std::vector<uint32_t>> children_;  // per level: [n_k + 1]
  std::vector<std::vector<uint32_t>> sizes_;     // per level: [n_k] keys
  std::vector<std::vector<float>> scores_;
  std::vector<std::vector<uint8_t>> alive_;
  std::vector<float> workspace_;
  uint64_t keys_ = 0;
};

class Calibrator {
 public:
  Calibrator(const CalibrationInput& input, int threads)
      : input_(input),
        threads_(threads),
        levels_(static_cast<int>(input.sparse[0].levels.size())),
        head_count_(static_cast<int64_t>(input.sparse.size()) * input.kv_heads),
        units_(calibration_units(input.calls, input.queries)) {
    const size_t coarse = static_cast<size_t>(std::max(levels_ - 1, 1));
    result_.queries = input.queries;
    result_.source = input.source;
    for (int k = 1; k < levels_; ++k) {
      result_.coarse_keep.push_back(std::pow(input.coarse_keep, k));
    }
    result_.thresholds.resize(size_t{kScopes} * Calibration::kPaths * kGroups * Calibration::kGrid);
    result_.coarse.assign(kScopes * kGroups * coarse, kBelowAllScores);
    result_.shares.assign(
        static_cast<size_t>(kScopes * input.layers * input.kv_heads * Calibration::kGrid), 1.0f);
  }

  Result<Calibration> run() {
    SQZ_RETURN_IF_ERROR(measure_flat());
    for (int k = 0; k < levels_ - 1; ++k) SQZ_RETURN_IF_ERROR(measure_tree(k));
    if (levels_ > 1) return finish_tree();
    for (int scope = 0; scope < kScopes; ++scope) {
      for (int group = 0; group < kGroups; ++group) {
        std::copy_n(grid(scope, 0, group), Calibration::kGrid, grid(scope, 1, group));
      }
    }
    return std::move(result_);
  }

 private:
  float* grid(int scope, int path, int group) {
    return result_.thresholds.data() +
           ((scope * Calibration::kPaths + path) * kGroups + group) * Calibration::kGrid;
  }
  float& coarse(int scope, int group, int k) {
    return result_
        .coarse[static_cast<size_t>((scope * kGroups + group) * std::max(levels_ - 1, 1) + k)];
  }

  void fill_grid(int path, const Sketches& sketches) {
    for (int scope = 0; scope < kScopes; ++scope) {
      for (int group = 0; group < kGroups; ++group) {
        const ScoreSketch& sketch = sketches[scope][is_copy(scope, group) ? group - 1 : group];
        float* out = grid(scope, path, group);
        for (int64_t i = 0; i < Calibration::kGrid; ++i) {
          out[i] = sketch.threshold(static_cast<double>(i) / (Calibration::kGrid - 1));
        }
        out[Calibration::kGrid - 1] = kBelowAllScores;
      }
    }
  }

  // Runs `measure` for every (head, scope, policy, unit) and merges what it records.
  template <class Measure>
  Status for_each_head(Sketches& total, const Measure& measure) {
    std::mutex mutex;
    return parallel_for(head_count_, threads_, [&](int64_t index) {
      const CalibrationLayer& layer = input_.sparse[index / input_.kv_heads];
      const int64_t h = index % input_.kv_heads;
      Head head(input_, layer, h);
      Sketches local;
      for (int scope = 0; scope < kScopes; ++scope) {
        for (int group = 0; group < kGroups; ++group) {
          if (is_copy(scope, group)) continue;
          for (const CalibrationUnit& unit : units_[scope]) {
            const Status status = measure(head, scope, group, unit, local[scope][group]);
            if (!status.ok()) {
              return Status(status.code(), concat("calibration of layer ", layer.layer,
                                                  ", KV head ", h, ": ", status.message()));
            }
          }
        }
      }
      const std::lock_guard lock(mutex);
      for (int scope = 0; scope < kScopes; ++scope) {
        for (int group = 0; group < kGroups; ++group) {
          total[scope][group].merge(local[scope][group]);
        }
        if (!flat_done_) flat_mean_[index * kScopes + scope] = std::move(local[scope][0]);
      }
      return Status();
    });
  }

  // The finest level alone: path 0 and the shares.
  Status measure_flat() {
    Sketches total;
    flat_mean_.resize(static_cast<size_t>(head_count_ * kScopes));
    const auto measure = [&](Head& head, int /*scope*/, int group, const CalibrationUnit& unit,
                             ScoreSketch& sketch) {
      SQZ_RETURN_IF_ERROR(head.score(levels_ - 1, false, unit, kPolicies[group]));
      head.record(levels_ - 1, false, sketch);
      return Status();
    };
    SQZ_RETURN_IF_ERROR(for_each_head(total, measure));
    fill_grid(0, total);
    for (int64_t index = 0; index < head_count_; ++index) {
      const int64_t layer = input_.sparse[index / input_.kv_heads].layer;
      for (int scope = 0; scope < kScopes; ++scope) {
        const int64_t row =
            (scope * input_.layers + layer) * input_.kv_heads + index % input_.kv_heads;
        const std::vector<float> kept = flat_mean_[index * kScopes + scope].kept(
            std::span<const float>(grid(scope, 0, 0), Calibration::kGrid));
        std::copy(kept.begin(), kept.end(), result_.shares.begin() + row * Calibration::kGrid);
      }
    }
    flat_done_ = true;
    flat_mean_ = {};
    return Status();
  }

  // Scores level `k` of what the levels above it let through.
  Status score_down_to(Head& head, int k, int scope, int group, const CalibrationUnit& unit) {
    for (int above = 0; above < k; ++above) {
      SQZ_RETURN_IF_ERROR(head.score(above, above > 0, unit, kPolicies[group]));
      head.descend(above, coarse(scope, group, above));
    }
    return head.score(k, k > 0, unit, kPolicies[group]);
  }

  Status measure_level(int k, Sketches& total) {
    return for_each_head(total, [&](Head& head, int scope, int group, const CalibrationUnit& unit,
                                    ScoreSketch& sketch) {
      SQZ_RETURN_IF_ERROR(score_down_to(head, k, scope, group, unit));
      head.record(k, k > 0, sketch);
      return Status();
    });
  }

  // T_(k+1), given those above it.
  Status measure_tree(int k) {
    Sketches total;
    SQZ_RETURN_IF_ERROR(measure_level(k, total));
    for (int scope = 0; scope < kScopes; ++scope) {
      for (int group = 0; group < kGroups; ++group) {
        const ScoreSketch& sketch = total[scope][is_copy(scope, group) ? group - 1 : group];
        const double keep = result_.coarse_keep[static_cast<size_t>(k)];
        coarse(scope, group, k) = keep < 1 ? sketch.threshold(keep) : kBelowAllScores;
      }
    }
    return Status();
  }

  Result<Calibration> finish_tree() {
    Sketches total;
    SQZ_RETURN_IF_ERROR(measure_level(levels_ - 1, total));
    fill_grid(1, total);
    return std::move(result_);
  }

  const CalibrationInput& input_;
  const int threads_;
  const int levels_;
  const int64_t head_count_;
  const std::array<std::vector<CalibrationUnit>, kScopes> units_;
  Calibration result_;
  bool flat_done_ = false;
  std::vector<ScoreSketch> flat_mean_;  // [sparse layers x Hkv, kScopes], policy mean
};

}  // namespace

std::vector<float> group_queries(const float* queries, int64_t kv_heads, int64_t group, int64_t n,
                                 int64_t dim) {
  std::vector<float> grouped(static_cast<size_t>(kv_heads * group * n * dim));
  for (int64_t head = 0; head < kv_heads * group; ++head) {
    for (int64_t t = 0; t < n; ++t) {
      const int64_t row = ((head / group) * n + t) * group + head % group;
      std::copy_n(queries + (head * n + t) * dim, dim, grouped.data() + row * dim);
    }
  }
  return grouped;
}

std::array<std::vector<CalibrationUnit>, kScopes> calibration_units(
    const std::vector<int64_t>& calls, int64_t queries) {
  std::array<std::vector<CalibrationUnit>, kScopes> units;
  int64_t first = 0;
  for (const int64_t count : calls) {
    units[count > 1 ? 1 : 0].push_back({first, count});
    first += count;
  }
  if (calls.empty()) units[1].push_back({0, queries});
  if (units[1].empty()) units[1] = units[0];
  if (!units[0].empty()) return units;
  for (int64_t i = 0; i < queries; ++i) units[0].push_back({i, 1});
  return units;
}

Result<Calibration> calibrate(const CalibrationInput& input, int threads) {
  if (input.sparse.empty()) return Calibration();
  return Calibrator(input, threads).run();
}

}  // namespace sqz
