#include "libindex/kmeans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "tests/libindex/kmeans_cost.h"

namespace sqz {
namespace {

using test::clustered_points;
using test::kmeans_cost;
using test::normalised;
using test::sizes_of;

std::vector<int32_t> run(const std::vector<float>& points, int64_t dim, int64_t clusters,
                         uint64_t seed, const float* weights = nullptr, int threads = 1) {
  const auto count = static_cast<int64_t>(points.size()) / dim;
  std::vector<int32_t> assignment(static_cast<size_t>(count), -1);
  KmeansProblem problem{points.data(), weights, count, dim, clusters, 10, seed, assignment.data()};
  const Status status = make_faiss_kmeans()->run({&problem, 1}, threads, {});
  EXPECT_TRUE(status.ok()) << status.message();
  return assignment;
}

// Lloyd's algorithm written out: random points first, 10 updates, then a last assignment.
std::vector<int32_t> lloyd(const std::vector<float>& unit, int64_t dim, int64_t clusters,
                           uint64_t seed, const std::vector<float>& weights) {
  const auto count = static_cast<int64_t>(unit.size()) / dim;
  test::Rng rng(seed);
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = 0; i < clusters; ++i) std::swap(order[i], order[i + rng.below(count - i)]);
  std::vector<double> centre(static_cast<size_t>(clusters * dim));
  for (int64_t k = 0; k < clusters; ++k) {
    for (int64_t c = 0; c < dim; ++c) centre[k * dim + c] = unit[order[k] * dim + c];
  }
  std::vector<int32_t> assignment(static_cast<size_t>(count));
  for (int iteration = 0; iteration <= 10; ++iteration) {
    for (int64_t i = 0; i < count; ++i) {
      double best = -2;
      for (int64_t k = 0; k < clusters; ++k) {
        double cosine = 0;
        for (int64_t c = 0; c < dim; ++c) cosine += unit[i * dim + c] * centre[k * dim + c];
        if (cosine > best) {
          best = cosine;
          assignment[i] = static_cast<int32_t>(k);
        }
      }
    }
    if (iteration == 10) break;
    std::vector<double> sum(centre.size(), 0.0);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = 0; c < dim; ++c) {
        sum[assignment[i] * dim + c] += double{weights[i]} * unit[i * dim + c];
      }
    }
    for (int64_t k = 0; k < clusters; ++k) {
      double square = 0;
      for (int64_t c = 0; c < dim; ++c) square += sum[k * dim + c] * sum[k * dim + c];
      if (square == 0) continue;  // an empty cluster keeps its centre
      for (int64_t c = 0; c < dim; ++c) centre[k * dim + c] = sum[k * dim + c] / std::sqrt(square);
    }
  }
  return assignment;
}

void expect_as_good_as_lloyd(const std::vector<float>& points, int64_t dim, int64_t clusters,
                             const std::vector<float>& weights, const float* given) {
  const std::vector<float> unit = normalised(points, dim);
  double ours = 0, reference = 0;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    ours += kmeans_cost(unit, dim, run(points, dim, clusters, seed, given), clusters, weights);
    reference +=
        kmeans_cost(unit, dim, lloyd(unit, dim, clusters, seed, weights), clusters, weights);
  }
  EXPECT_LE(ours, 1.01 * reference) << "over 4 seeds";
  EXPECT_GT(ours, 0.5 * reference) << "the two costs do not measure the same thing";
}

TEST(Kmeans, ObjectiveIsThatOfPlainLloyd) {
  const std::vector<float> points = clustered_points(3000, 32, 150, 0.6f, 3);
  expect_as_good_as_lloyd(points, 32, 120, std::vector<float>(3000, 1.0f), nullptr);
}

TEST(Kmeans, WeightedObjectiveIsThatOfPlainLloyd) {
  const std::vector<float> points = clustered_points(1500, 16, 60, 0.8f, 4);
  test::Rng rng(5);
  std::vector<float> weights(1500);
  for (float& w : weights) w = rng.below(10) == 0 ? 200.0f : 1.0f;
  expect_as_good_as_lloyd(points, 16, 80, weights, weights.data());
}

// Converged, every point is nearest to the mean of its own cluster, if all points take part: more
// than 256 a cluster are not sampled down.
TEST(Kmeans, UsesAllPoints) {
  std::vector<float> points;
  std::vector<int32_t> assignment(4000);
  for (int i = 0; i < 4000; ++i) {
    const double angle = i * 3.14159265358979 / 8000;
    points.push_back(static_cast<float>(std::cos(angle)));
    points.push_back(static_cast<float>(std::sin(angle)));
  }
  const KmeansProblem problem{points.data(), nullptr, 4000, 2, 2, 40, 1, assignment.data()};
  ASSERT_TRUE(make_faiss_kmeans()->run({&problem, 1}, 1, {}).ok());
  double sum[2][2] = {};
  for (int i = 0; i < 4000; ++i) {
    for (int c : {0, 1}) sum[assignment[i]][c] += points[2 * i + c];
  }
  int misplaced = 0;
  for (int i = 0; i < 4000; ++i) {
    double cosine[2];
    for (int k : {0, 1}) {
      cosine[k] = (points[2 * i] * sum[k][0] + points[2 * i + 1] * sum[k][1]) /
                  std::hypot(sum[k][0], sum[k][1]);
    }
    misplaced += cosine[assignment[i]] < cosine[1 - assignment[i]];
  }
  EXPECT_LE(misplaced, 2);
}

TEST(Kmeans, IgnoresLength) {
  std::vector<float> points = clustered_points(600, 8, 20, 0.5f, 6);
  const std::vector<int32_t> before = run(points, 8, 20, 1);
  for (int64_t i = 0; i < 600; ++i) {
    const float factor = i % 2 == 0 ? 1024.0f : 0x1p-40f;  // exact in floating point
    for (int64_t c = 0; c < 8; ++c) points[i * 8 + c] *= factor;
  }
  EXPECT_EQ(run(points, 8, 20, 1), before);
}

TEST(Kmeans, SameBitsForAnyThreadsAndBatch) {
  constexpr int64_t kHeads = 5, kCount = 1111, kDim = 24, kClusters = 70;
  std::vector<std::vector<float>> points;
  for (uint64_t h = 0; h < kHeads; ++h) {
    points.push_back(clustered_points(kCount, kDim, 40, 0.7f, 20 + h));
  }
  const auto batch = [&](int threads) {
    std::vector<std::vector<int32_t>> out(kHeads, std::vector<int32_t>(kCount));
    std::vector<KmeansProblem> problems;
    for (uint64_t h = 0; h < kHeads; ++h) {
      problems.push_back(
          {points[h].data(), nullptr, kCount, kDim, kClusters, 10, h, out[h].data()});
    }
    int done = 0;
    EXPECT_TRUE(make_faiss_kmeans()->run(problems, threads, [&] { ++done; }).ok());
    EXPECT_EQ(done, kHeads);
    return out;
  };
  const auto one = batch(1);
  for (int threads : {1, 2, 3, 8}) EXPECT_EQ(batch(threads), one) << threads << " threads";
  for (uint64_t h = 0; h < kHeads; ++h) {
    EXPECT_EQ(run(points[h], kDim, kClusters, h), one[h]) << "alone, head " << h;
  }
}

TEST(Kmeans, SeedsDiffer) {
  const std::vector<float> points = clustered_points(500, 8, 30, 0.9f, 7);
  EXPECT_NE(run(points, 8, 30, 1), run(points, 8, 30, 2));
  std::set<uint64_t> seeds;
  for (int64_t i = 0; i < 8 * 8 * 3; ++i) seeds.insert(kmeans_seed(0, i / 24, i / 3 % 8, i % 3));
  EXPECT_EQ(seeds.size(), 8u * 8 * 3);
}

TEST(Kmeans, NoClusterIsEmpty) {
  const std::vector<float> same(300 * 4, 0.25f);
  for (const int64_t clusters : {1, 64, 299, 300}) {
    const auto sizes = sizes_of(run(same, 4, clusters, 1), clusters);
    const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
    EXPECT_TRUE(*least >= 300 / clusters / 2 && *least > 0) << clusters;
    EXPECT_LE(*most, 3 * (300 / clusters)) << clusters;
  }
  // 3 distinct directions, one of them of zero vectors, and 40 clusters wanted.
  std::vector<float> few;
  for (int i = 0; i < 400; ++i) {
    const float row[4] = {i % 3 == 0 ? 1.0f : 0.0f, i % 3 == 1 ? 2.0f : 0.0f, 0, 0};
    few.insert(few.end(), row, row + 4);
  }
  for (int64_t size : sizes_of(run(few, 4, 40, 9), 40)) EXPECT_GT(size, 0);
}

TEST(Kmeans, RefillCutsTheLargestApart) {
  // Cluster 0 holds two opposite bundles of 6, cluster 1 holds 5, cluster 2 nothing.
  std::vector<float> unit;
  std::vector<int32_t> assignment;
  for (int i = 0; i < 17; ++i) {
    const bool first = i < 6, second = i >= 6 && i < 12;
    const float row[2] = {first ? 1.0f : second ? -1.0f : 0.0f, first || second ? 0.0f : 1.0f};
    unit.insert(unit.end(), row, row + 2);
    assignment.push_back(first || second ? 0 : 1);
  }
  refill_empty_clusters(unit.data(), 17, 2, 3, assignment.data());
  const std::vector<int64_t> sizes = sizes_of(assignment, 3);
  EXPECT_EQ(sizes, (std::vector<int64_t>{6, 5, 6}));
  for (int i = 1; i < 6; ++i) EXPECT_EQ(assignment[i], assignment[0]);
  for (int i = 7; i < 12; ++i) EXPECT_EQ(assignment[i], assignment[6]);
}

TEST(Kmeans, EngineNames) {
  EXPECT_EQ(make_kmeans_engine({"faiss", 64, 0}).value()->name(), "faiss");
  EXPECT_TRUE(make_kmeans_engine({"auto", 64, 0}).ok());
  EXPECT_EQ(make_kmeans_engine({"auto", 300, 0}).value()->layer_engine(), nullptr)
      << "no engine for whole layers does 300 components";
  EXPECT_EQ(make_kmeans_engine({"abacus", 64, 0}).status().code(), Code::kInvalidArgument);
  const auto cuda = make_kmeans_engine({"cuda", 64, 0});  // where it is not, it is said why
  if (!cuda.ok()) {
    EXPECT_EQ(cuda.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(cuda.status().message().rfind("engine cuda: ", 0), 0u) << cuda.status().message();
  }
}

}  // namespace
}  // namespace sqz
