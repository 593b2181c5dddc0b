// Random numbers and cluster sizes of the indexes that are made for timing.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "formats/base/random.h"

namespace sqz::bench {

class NormalRandom : public Random {
 public:
  using Random::Random;
  // A sum of four uniforms: fast.
  float normal() {
    const uint64_t bits = next();
    const auto sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    return (static_cast<float>(sum) * 0x1p-16f - 2.0f) * 1.7320508f;
  }
};

// n runs of varied length over [0, total), none empty: [n + 1].
inline std::vector<uint32_t> random_offsets(int64_t n, int64_t total, NormalRandom& random) {
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

}  // namespace sqz::bench
