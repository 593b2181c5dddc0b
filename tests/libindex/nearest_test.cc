#include "libindex/nearest.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string_view>

#include "formats/base/status.h"
#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/kernels/cpu/offline_kernels.h"
#include "tests/libruntime/random_data.h"

namespace sqz {
namespace {

struct Found {
  std::vector<float> products;
  std::vector<int64_t> labels;
};

Found nearest(const std::vector<float>& centroids, const std::vector<float>& points, int64_t dim) {
  const int64_t n = std::ssize(points) / dim;
  Found found{std::vector<float>(n), std::vector<int64_t>(n, -1)};
  NearestCentroids(centroids.data(), std::ssize(centroids) / dim, dim)
      .find(points.data(), n, found.products.data(), found.labels.data());
  return found;
}

double product(const float* a, const float* b, int64_t dim) {
  double sum = 0;
  for (int64_t k = 0; k < dim; ++k) sum += double{a[k]} * b[k];
  return sum;
}

TEST(Nearest, EqualsASearchInDoublePrecision) {
  testing::Random random(1);
  for (const int64_t dim : {1, 3, 64, 96, 128}) {
    for (const int64_t clusters : {1, 2, 63, 64, 65, 130, 1311}) {
      for (const int64_t n : {1, 5, 6, 7, 239, 240, 487}) {
        SCOPED_TRACE(concat("dim ", dim, " clusters ", clusters, " points ", n));
        const std::vector<float> centroids = random.normals(clusters * dim);
        const std::vector<float> points = random.normals(n * dim);
        const Found found = nearest(centroids, points, dim);
        for (int64_t i = 0; i < n; ++i) {
          double best = -INFINITY;
          for (int64_t c = 0; c < clusters; ++c) {
            best = std::max(best, product(&points[i * dim], &centroids[c * dim], dim));
          }
          ASSERT_GE(found.labels[i], 0);
          ASSERT_LT(found.labels[i], clusters);
          const double at_label = product(&points[i * dim], &centroids[found.labels[i] * dim], dim);
          const double tolerance = 1e-5 * std::sqrt(static_cast<double>(dim));
          ASSERT_NEAR(at_label, best, tolerance) << "point " << i;
          ASSERT_NEAR(found.products[i], at_label, tolerance) << "point " << i;
        }
      }
    }
  }
}

TEST(Nearest, LowestNumberAmongEquals) {
  testing::Random random(2);
  const int64_t dim = 32;
  const std::vector<float> few = random.normals(5 * dim);
  // Each of five centroids again and again, in every lane and panel.
  std::vector<float> centroids;
  for (int64_t c = 0; c < 333; ++c) {
    const auto from = few.begin() + (c < 20 ? c / 4 : random.below(5)) * dim;
    centroids.insert(centroids.end(), from, from + dim);
  }
  const Found found = nearest(centroids, few, dim);
  EXPECT_EQ(found.labels, (std::vector<int64_t>{0, 4, 8, 12, 16}));
}

TEST(Nearest, ACentroidThatFillsUpAPanelIsNeverFound) {
  // All products are negative: zeros in the padding would win, copies must not.
  const std::vector<float> centroids = {-3, -2, -1};
  const Found found = nearest(centroids, {1.0f}, 1);
  EXPECT_EQ(found.labels[0], 2);
  EXPECT_EQ(found.products[0], -1.0f);
}

TEST(Nearest, SameBitsOnEveryProcessorWithFusedMultiplyAdd) {
  testing::Random random(3);
  const int64_t dim = 80, clusters = 192, n = 500;
  const std::vector<float> panels = random.normals(clusters * dim),
                           points = random.normals(n * dim);
  Found first;
  for (const OfflineKernels* kernels : available_offline_kernels()) {
    if (!std::string_view(kernels->name).starts_with("avx")) continue;
    Found found{std::vector<float>(n), std::vector<int64_t>(n)};
    kernels->nearest(points.data(), n, dim, panels.data(), clusters, found.products.data(),
                     found.labels.data());
    if (first.labels.empty()) first = found;
    EXPECT_EQ(found.labels, first.labels) << kernels->name;
    EXPECT_EQ(found.products, first.products) << kernels->name;
  }
  if (first.labels.empty()) GTEST_SKIP() << "this processor has neither AVX2 nor AVX-512";
}

}  // namespace
}  // namespace sqz
