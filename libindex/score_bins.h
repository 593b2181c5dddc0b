// The bins of ScoreSketch (libindex/quantile.h), for host and device code alike: 1/128 wide in log
// S from -60 to 0, 1/4 wide down to -1084.
#pragma once

#include <cstdint>

#include "formats/base/host_device.h"

namespace sqz {

inline constexpr int64_t kCoarseScoreBins = 1024 * 4;
inline constexpr int64_t kScoreBins = kCoarseScoreBins + 60 * 128;
inline constexpr double kScoreSeam = -60.0, kLowestScore = kScoreSeam - 1024.0;

// 0 also for what is lower than all, and for NaN.
SQZ_HOST_DEVICE inline int64_t score_bin(double score) {
  if (!(score >= kLowestScore)) return 0;
  const double bin = score < kScoreSeam
                         ? (score - kLowestScore) * 4.0
                         : static_cast<double>(kCoarseScoreBins) + (score - kScoreSeam) * 128;
  const auto whole = static_cast<int64_t>(bin);
  return whole < kScoreBins ? whole : kScoreBins - 1;
}

}  // namespace sqz
