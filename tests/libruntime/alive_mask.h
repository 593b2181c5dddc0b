// Clusters that are alive as one flag each, for tests: as ranges, and packed to those alone.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "libruntime/select/score.h"

namespace sqz::testing {

using AliveMask = std::vector<uint8_t>;  // [n], 0 or 1

inline std::vector<ClusterRange> ranges_of(const AliveMask& alive) {
  std::vector<ClusterRange> ranges;
  for (uint32_t i = 0; i < alive.size(); ++i) {
    if (alive[i] == 0) continue;
    if (i == 0 || alive[i - 1] == 0) ranges.push_back({i, 0});
    ++ranges.back().count;
  }
  return ranges;
}

template <class T>
std::vector<T> packed(const std::vector<T>& all, const AliveMask& alive) {
  std::vector<T> out;
  for (size_t i = 0; i < all.size(); ++i) {
    if (alive[i] != 0) out.push_back(all[i]);
  }
  return out;
}

// -infinity where nothing is alive.
inline std::vector<float> unpacked(const std::vector<float>& scores, const AliveMask& alive) {
  std::vector<float> all;
  size_t next = 0;
  for (const uint8_t flag : alive) {
    all.push_back(flag != 0 ? scores[next++] : -std::numeric_limits<float>::infinity());
  }
  return all;
}

}  // namespace sqz::testing
