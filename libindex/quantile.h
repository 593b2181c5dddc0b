// A sketch of the distribution of cluster scores: a histogram of log S, weighted by cluster sizes.
//
// Integer weights in fixed bins, so that sketches filled by any number of threads, in any order,
// merge to the same bits. Bins are 1/128 wide in log S from -60 to 0, i.e. 0.8 % of S, and 1/4 wide
// down to -1084; whatever is lower counts as lowest.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sqz {

// Finite thresholds beyond every score: log S is at most 0 (a cluster of one key with all the
// mass), and a score of an alive cluster is finite.
inline constexpr float kAboveAllScores = 1.0f;
inline constexpr float kBelowAllScores = -3.0e38f;

class ScoreSketch {
 public:
  ScoreSketch();
  // `keys` keys have score `log_score`.
  void add(float log_score, uint64_t keys);
  // `keys` keys have no score: coarser levels dropped them. No threshold keeps them.
  void add_dropped(uint64_t keys) { total_ += keys; }
  // keys[b] keys have scores of bin b of libindex/score_bins.h, [kScoreBins], and `dropped` none.
  void add_bins(std::span<const uint64_t> keys, uint64_t dropped);
  void merge(const ScoreSketch& other);

  uint64_t total() const { return total_; }  // all keys ever added, dropped ones included

  // The threshold T such that `fraction` of all keys have a score >= T; linear inside a bin.
  // fraction <= 0: kAboveAllScores. More than were scored: kBelowAllScores, which keeps all that
  // were. Non-increasing in `fraction`.
  float threshold(double fraction) const;
  // Thresholds of fractions from 0 to 1, as many steps apart as `out` is long; the last below every
  // score.
  void fill_curve(std::span<float> out) const;
  // For each threshold, the fraction of all keys with a score >= it, by the same interpolation.
  std::vector<float> kept(std::span<const float> thresholds) const;

 private:
  std::vector<uint64_t> bins_;  // ascending in score
  uint64_t total_ = 0;
};

}  // namespace sqz
