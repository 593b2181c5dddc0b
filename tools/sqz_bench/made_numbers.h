// Random numbers and cluster sizes of the indexes that are made for timing.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace sqz::bench {

// Fast and the same everywhere: splitmix64, and a sum of four uniforms for a normal number.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  float normal() {
    const uint64_t bits = next();
    const auto sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    return (static_cast<float>(sum) * 0x1p-16f - 2.0f) * 1.7320508f;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

// n runs of varied length over [0, total), none empty: [n + 1].
inline std::vector<uint32_t> random_offsets(int64_t n, int64_t total, Random& random) {
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
