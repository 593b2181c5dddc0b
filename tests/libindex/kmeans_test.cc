#include "libindex/kmeans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/libindex/kmeans_cost.h"

namespace sqz {
namespace {

using test::clustered_points;
using test::sizes_of;

std::vector<int32_t> run(const std::vector<float>& points, int64_t dim, int64_t clusters,
                         uint64_t seed) {
  const auto count = static_cast<int64_t>(points.size()) / dim;
  std::vector<int32_t> assignment(static_cast<size_t>(count), -1);
  KmeansProblem problem{points.data(), nullptr, count, dim, clusters, 10, seed, assignment.data()};
  const Status status = make_faiss_kmeans()->run({&problem, 1}, 1, {});
  EXPECT_TRUE(status.ok()) << status.message();
  return assignment;
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
