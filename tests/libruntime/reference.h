// What libruntime must compute, written as plainly as possible in double precision: no tiles, no
// layouts, no tricks. Tests compare the library with this.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "formats/base/dtype.h"
#include "formats/sqz_file.h"
#include "libruntime/select/score.h"

namespace sqz::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Element i of an array of BF16, F16 or F32.
inline double element(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::kBF16:
      return to_float(static_cast<const BFloat16*>(data)[i]);
    case DType::kF16:
      return to_float(static_cast<const Float16*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

inline double dot(const float* q, DType dtype, const void* keys, int64_t row, int64_t dim) {
  double sum = 0;
  for (int64_t c = 0; c < dim; ++c) sum += double{q[c]} * element(dtype, keys, row * dim + c);
  return sum;
}

// log of the combined S_i (select/score.h), one query head at a time, straight from equation 1.
inline std::vector<double> scores(const ScoreProblem& p) {
  const int64_t n = p.clusters;
  const auto scored = [&](int64_t j) {
    return p.sizes[j] != 0 && (p.alive == nullptr || p.alive[j] != 0);
  };
  std::vector<double> combined(n, p.policy == Group::kMean ? 0.0 : -kInfinity);
  for (int64_t g = 0; g < p.group; ++g) {
    std::vector<double> head_mean(n, 0.0);
    for (int64_t t = 0; t < p.tokens; ++t) {
      const float* q = p.queries + (t * p.group + g) * p.dim;
      std::vector<double> logit(n, -kInfinity);
      double top = -kInfinity;
      for (int64_t j = 0; j < n; ++j) {
        if (!scored(j)) continue;
        logit[j] = p.scale * dot(q, p.dtype, p.centroids, j, p.dim);
        top = std::max(top, logit[j]);
      }
      double denominator = 0;
      for (int64_t j = 0; j < n; ++j) {
        if (scored(j)) denominator += p.sizes[j] * std::exp(logit[j] - top);
      }
      for (int64_t j = 0; j < n; ++j) {
        if (!scored(j)) continue;
        const double s = std::exp(logit[j] - top) / denominator;
        head_mean[j] += s / static_cast<double>(p.tokens);
        if (p.policy == Group::kAny) combined[j] = std::max(combined[j], s);
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      if (p.policy == Group::kMean) combined[j] += head_mean[j] / static_cast<double>(p.group);
      if (p.policy == Group::kMax) combined[j] = std::max(combined[j], head_mean[j]);
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    combined[j] = scored(j) ? std::log(combined[j]) : -kInfinity;
  }
  return combined;
}

}  // namespace sqz::reference
