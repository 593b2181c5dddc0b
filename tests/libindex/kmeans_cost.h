// What k-means made, measured in float64.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "libindex/kmeans.h"
#include "tests/libindex/clustered_data.h"

namespace sqz::test {

inline std::vector<float> normalised(const std::vector<float>& points, int64_t dim) {
  std::vector<float> unit(points.size());
  normalise_rows(points.data(), static_cast<int64_t>(points.size()) / dim, dim, unit.data());
  return unit;
}

inline std::vector<int64_t> sizes_of(const std::vector<int32_t>& assignment, int64_t clusters) {
  std::vector<int64_t> sizes(static_cast<size_t>(clusters), 0);
  for (const int32_t k : assignment) {
    if (k < 0 || k >= clusters) ADD_FAILURE() << "cluster " << k;
    ++sizes.at(static_cast<size_t>(k));
  }
  return sizes;
}

// Sum over points of weight x (1 - cosine to the unit mean of its cluster); no weights: all 1.
inline double kmeans_cost(const std::vector<float>& unit, int64_t dim,
                          const std::vector<int32_t>& assignment, int64_t clusters,
                          const std::vector<float>& weights) {
  std::vector<double> sum(static_cast<size_t>(clusters * dim), 0.0);
  double total = 0;
  for (size_t i = 0; i < assignment.size(); ++i) {
    const double weight = weights.empty() ? 1 : weights[i];
    total += weight;
    for (int64_t c = 0; c < dim; ++c) {
      sum[assignment[i] * dim + c] += weight * unit[static_cast<int64_t>(i) * dim + c];
    }
  }
  for (int64_t k = 0; k < clusters; ++k) {
    double square = 0;
    for (int64_t c = 0; c < dim; ++c) square += sum[k * dim + c] * sum[k * dim + c];
    total -= std::sqrt(square);
  }
  return total;
}

}  // namespace sqz::test
