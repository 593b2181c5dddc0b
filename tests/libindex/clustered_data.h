// Points around random directions, with lengths that vary: what keys of a head look like to
// k-means.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace sqz::test {

struct Rng {
  std::mt19937_64 engine;
  explicit Rng(uint64_t seed) : engine(seed) {}
  // Sum of uniforms: the same numbers with every standard library, unlike normal_distribution.
  float normal() {
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(engine() >> 40) * 0x1p-24f;
    return sum;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); }
};

// [count, dim]: `centres` random directions plus noise of relative size `noise`.
inline std::vector<float> clustered_points(int64_t count, int64_t dim, int64_t centres, float noise,
                                           uint64_t seed) {
  Rng rng(seed);
  std::vector<float> centre(static_cast<size_t>(centres * dim));
  for (float& x : centre) x = rng.normal();
  std::vector<float> points(static_cast<size_t>(count * dim));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = rng.below(centres);
    const float length = 0.5f + static_cast<float>(rng.below(1000)) * 0.002f;
    for (int64_t c = 0; c < dim; ++c) {
      points[i * dim + c] = length * (centre[from * dim + c] + noise * rng.normal());
    }
  }
  return points;
}

}  // namespace sqz::test
