// Calibration measures the scores of the clusters of every KV head, as sketches. On the CPU
// they come from the runtime's own score_clusters(); an engine may bring a scorer for its device
// (LayerEngine::calibration_scorer()), with scores that differ by rounding alone.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "libindex/calibrate.h"
#include "libindex/quantile.h"
#include "libruntime/select/score.h"

namespace sqz {

// One a scope, of one KV head or of all.
using CalibrationSketches = std::array<ScoreSketch, Calibration::kScopes>;

// One measurement of every unit of every scope.
struct CalibrationPass {
  int level = 0;  // whose scores are recorded; 0 is the coarsest
  // T of each level above it, [scopes, thresholds.size() / 2]: the clusters whose parents reach
  // them are scored. Empty: all of the level is scored, as without a tree.
  std::span<const float> thresholds;

  bool tree() const { return !thresholds.empty(); }
  float threshold(int scope, int above) const {
    const size_t levels = thresholds.size() / Calibration::kScopes;
    return thresholds[static_cast<size_t>(scope) * levels + static_cast<size_t>(above)];
  }
};

class CalibrationScorer {
 public:
  virtual ~CalibrationScorer() = default;
  // `take(i, sketches)` gets KV head i % Hkv of sparse layer i / Hkv: once each, one call at a
  // time, in any order. kNumeric, naming layer and KV head, where a logit is NaN or infinite.
  virtual Status run(const CalibrationPass& pass,
                     const std::function<void(int64_t, CalibrationSketches&)>& take) = 0;
};

// `input` must outlive it.
std::unique_ptr<CalibrationScorer> make_cpu_calibration_scorer(const CalibrationInput& input,
                                                               int threads);

// Keys of each cluster of one KV head, coarse to fine: [levels][n_k].
std::vector<std::vector<uint32_t>> calibration_sizes(const CalibrationInput& input,
                                                     const CalibrationLayer& layer, int64_t head);

// The error of a head that has a logit that is no number.
Status calibration_error(const CalibrationInput& input, int64_t index, const Status& status);

}  // namespace sqz
