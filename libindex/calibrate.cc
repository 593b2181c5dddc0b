#include "libindex/calibrate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "libindex/calibration_scorer.h"
#include "libindex/quantile.h"

namespace sqz {
namespace {

constexpr int kScopes = Calibration::kScopes;

class Calibrator {
 public:
  Calibrator(const CalibrationInput& input, CalibrationScorer& scorer)
      : input_(input),
        scorer_(scorer),
        levels_(static_cast<int>(input.sparse[0].levels.size())),
        head_count_(std::ssize(input.sparse) * input.kv_heads),
        coarse_levels_(std::max(levels_ - 1, 1)) {
    result_.queries = input.queries;
    result_.source = input.source;
    for (int k = 1; k < levels_; ++k) {
      result_.coarse_keep.push_back(std::pow(input.coarse_keep, k));
    }
    result_.thresholds.resize(size_t{kScopes} * Calibration::kPaths * Calibration::kGrid);
    result_.coarse.assign(static_cast<size_t>(kScopes * coarse_levels_), kBelowAllScores);
    result_.shares.assign(
        static_cast<size_t>(kScopes * input.layers * input.kv_heads * Calibration::kGrid), 1.0f);
  }

  Result<Calibration> run() {
    SQZ_RETURN_IF_ERROR(measure_flat());
    for (int k = 0; k < levels_ - 1; ++k) SQZ_RETURN_IF_ERROR(measure_coarse(k));
    if (levels_ > 1) {
      SQZ_ASSIGN_OR_RETURN(const CalibrationSketches total, measure_level(levels_ - 1));
      fill_grid(1, total);
    }
    return std::move(result_);
  }

 private:
  std::span<float> grid(int scope, int path) {
    return std::span(result_.thresholds)
        .subspan(static_cast<size_t>((scope * Calibration::kPaths + path) * Calibration::kGrid),
                 static_cast<size_t>(Calibration::kGrid));
  }

  void fill_grid(int path, const CalibrationSketches& sketches) {
    for (int scope = 0; scope < kScopes; ++scope) sketches[scope].fill_curve(grid(scope, path));
  }

  static void merge(const CalibrationSketches& head, CalibrationSketches& total) {
    for (int scope = 0; scope < kScopes; ++scope) total[scope].merge(head[scope]);
  }

  // The finest level alone: path 0 and the shares.
  Status measure_flat() {
    CalibrationSketches total;
    std::vector<CalibrationSketches> heads(static_cast<size_t>(head_count_));
    SQZ_RETURN_IF_ERROR(
        scorer_.run({levels_ - 1, {}}, [&](int64_t index, CalibrationSketches& head) {
          merge(head, total);
          heads[static_cast<size_t>(index)] = std::move(head);
        }));
    fill_grid(0, total);
    if (levels_ == 1) fill_grid(1, total);
    for (int64_t index = 0; index < head_count_; ++index) {
      const int64_t layer = input_.sparse[index / input_.kv_heads].layer;
      for (int scope = 0; scope < kScopes; ++scope) {
        const int64_t row =
            (scope * input_.layers + layer) * input_.kv_heads + index % input_.kv_heads;
        const std::vector<float> kept =
            heads[static_cast<size_t>(index)][scope].kept(grid(scope, 0));
        std::copy(kept.begin(), kept.end(), result_.shares.begin() + row * Calibration::kGrid);
      }
    }
    return Status();
  }

  // Level `k` of what the levels above it let through.
  Result<CalibrationSketches> measure_level(int k) {
    CalibrationSketches total;
    SQZ_RETURN_IF_ERROR(scorer_.run(
        {k, result_.coarse}, [&](int64_t, CalibrationSketches& head) { merge(head, total); }));
    return total;
  }

  // T_(k+1), given those above it.
  Status measure_coarse(int k) {
    SQZ_ASSIGN_OR_RETURN(const CalibrationSketches total, measure_level(k));
    const double keep = result_.coarse_keep[static_cast<size_t>(k)];
    for (int scope = 0; scope < kScopes; ++scope) {
      result_.coarse[static_cast<size_t>(scope * coarse_levels_ + k)] =
          keep < 1 ? total[scope].threshold(keep) : kBelowAllScores;
    }
    return Status();
  }

  const CalibrationInput& input_;
  CalibrationScorer& scorer_;
  const int levels_;
  const int64_t head_count_;
  const int coarse_levels_;  // of Calibration::coarse
  Calibration result_;
};

}  // namespace

CalibrationInput calibration_input(const IndexMetadata& metadata, std::string source) {
  const ModelDescription& model = metadata.model;
  CalibrationInput out;
  out.layers = model.layers;
  out.kv_heads = model.kv_heads;
  out.group = model.group_size();
  out.dim = model.head_dim;
  out.scale = static_cast<float>(model.attention_scale);
  out.dtype = metadata.dtype;
  out.source = std::move(source);
  return out;
}

std::vector<float> group_queries(const float* queries, int64_t kv_heads, int64_t group, int64_t n,
                                 int64_t dim, bool by_token) {
  const int64_t heads = kv_heads * group;
  std::vector<float> grouped(static_cast<size_t>(heads * n * dim));
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t t = 0; t < n; ++t) {
      const int64_t from = by_token ? t * heads + head : head * n + t;
      const int64_t row = ((head / group) * n + t) * group + head % group;
      std::copy_n(queries + from * dim, dim, grouped.data() + row * dim);
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

Result<Calibration> calibrate(const CalibrationInput& input, CalibrationScorer& scorer) {
  if (input.sparse.empty()) return Calibration();
  return Calibrator(input, scorer).run();
}

Result<Calibration> calibrate(const CalibrationInput& input, int threads) {
  return calibrate(input, *make_cpu_calibration_scorer(input, threads));
}

}  // namespace sqz
