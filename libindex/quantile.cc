#include "libindex/quantile.h"

#include <algorithm>

#include "libindex/score_bins.h"

namespace sqz {
namespace {

constexpr int64_t kCoarse = kCoarseScoreBins, kBins = kScoreBins;
constexpr double kSeam = kScoreSeam, kLowest = kLowestScore;

double lower_edge(int64_t bin) {
  if (bin <= kCoarse) return kLowest + static_cast<double>(bin) / 4.0;
  return kSeam + static_cast<double>(bin - kCoarse) / 128.0;
}

}  // namespace

ScoreSketch::ScoreSketch() : bins_(kBins, 0) {}

void ScoreSketch::add(float log_score, uint64_t keys) {
  bins_[score_bin(log_score)] += keys;
  total_ += keys;
}

void ScoreSketch::add_bins(std::span<const uint64_t> keys, uint64_t dropped) {
  for (size_t i = 0; i < bins_.size(); ++i) {
    bins_[i] += keys[i];
    total_ += keys[i];
  }
  total_ += dropped;
}

void ScoreSketch::merge(const ScoreSketch& other) {
  for (size_t i = 0; i < bins_.size(); ++i) bins_[i] += other.bins_[i];
  total_ += other.total_;
}

float ScoreSketch::threshold(double fraction) const {
  if (fraction <= 0) return kAboveAllScores;
  const double wanted = fraction * static_cast<double>(total_);
  double above = 0;
  for (int64_t bin = kBins; bin-- > 1;) {
    const double inside = static_cast<double>(bins_[bin]);
    if (inside > 0 && above + inside >= wanted) {
      const double upper = lower_edge(bin + 1);
      const double share = (wanted - above) / inside;
      return static_cast<float>(upper - share * (upper - lower_edge(bin)));
    }
    above += inside;
  }
  return kBelowAllScores;
}

void ScoreSketch::fill_curve(std::span<float> out) const {
  const auto steps = static_cast<double>(out.size() - 1);
  for (size_t i = 0; i < out.size(); ++i) out[i] = threshold(static_cast<double>(i) / steps);
  out.back() = kBelowAllScores;
}

std::vector<float> ScoreSketch::kept(std::span<const float> thresholds) const {
  std::vector<uint64_t> above(bins_.size() + 1, 0);  // [b]: keys in bins b and higher
  for (size_t b = bins_.size(); b-- > 0;) above[b] = above[b + 1] + bins_[b];

  std::vector<float> fractions;
  for (float threshold : thresholds) {
    const int64_t cut = score_bin(threshold);
    double part = 0;
    if (cut > 0) {
      const double upper = lower_edge(cut + 1);
      part = std::clamp((upper - threshold) / (upper - lower_edge(cut)), 0.0, 1.0);
    } else if (threshold <= kBelowAllScores) {
      part = 1;  // the lowest bin has no lower edge: it is kept whole or not at all
    }
    const double kept =
        static_cast<double>(above[cut + 1]) + part * static_cast<double>(bins_[cut]);
    fractions.push_back(
        static_cast<float>(kept / static_cast<double>(std::max(total_, uint64_t{1}))));
  }
  return fractions;
}

}  // namespace sqz
