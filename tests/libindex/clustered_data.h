// Points around random directions, with lengths that vary: what keys of a head look like to
// k-means.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/libruntime/random_data.h"

namespace sqz::test {

using Rng = testing::Random;

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
