// The trainer that libsqz has in place of FAISS gives every point the cluster that FAISS gives it.
// The last bits of sums decide that, so the two are compared on points between clusters.
#define make_faiss_kmeans make_own_kmeans
#include "libindex/without/faiss_kmeans.cc"
#undef make_faiss_kmeans

#include <gtest/gtest.h>

#include "tests/libindex/clustered_data.h"

namespace sqz {

std::unique_ptr<KmeansEngine> make_faiss_kmeans();

namespace {

std::vector<int32_t> run(KmeansEngine& engine, KmeansProblem problem, int threads) {
  std::vector<int32_t> out(static_cast<size_t>(problem.count), -1);
  problem.assignment = out.data();
  const Status status = engine.run({&problem, 1}, threads, {});
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

void expect_same(const KmeansProblem& problem) {
  const auto own = run(*make_own_kmeans(), problem, 2);
  EXPECT_EQ(own, run(*make_faiss_kmeans(), problem, 1))
      << problem.count << " points of " << problem.dim << " components into " << problem.clusters
      << " clusters, seed " << problem.seed;
}

TEST(Trainer, HasTheBytesOfFaiss) {
  for (const int64_t dim : {3, 16, 64, 96, 128}) {
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      const int64_t count = 1500 + dim;
      const std::vector<float> points = test::clustered_points(count, dim, 40, 3, seed);
      test::Rng rng(seed);
      std::vector<float> weights;
      for (int64_t i = 0; i < count; ++i) weights.push_back(static_cast<float>(rng.below(50) + 1));
      const uint64_t large = kmeans_seed(seed, 3, 1, 0);
      expect_same({points.data(), nullptr, count, dim, count / 20, 10, large, nullptr});
      expect_same({points.data(), weights.data(), count, dim, count / 3, 3, seed, nullptr});
      // Of more than 256 points a cluster FAISS would leave some out.
      expect_same({points.data(), nullptr, count, dim, 4, 3, seed, nullptr});
    }
  }
}

// Clusters are split where others are empty: equal points, zeros, and more clusters than
// directions.
TEST(Trainer, SplitsClustersAsFaissDoes) {
  std::vector<float> points;
  for (int i = 0; i < 900; ++i) {
    const float noise = i % 7 == 0 ? 0.01f * static_cast<float>(i % 11) : 0.0f;
    const float row[4] = {i % 3 == 0 ? 1.0f : 0.0f, i % 3 == 1 ? 2.0f + noise : 0.0f, noise, 0};
    points.insert(points.end(), row, row + 4);
  }
  for (const int64_t clusters : {5, 40, 300, 899}) {
    expect_same({points.data(), nullptr, 900, 4, clusters, 10, 9, nullptr});
  }
}

}  // namespace
}  // namespace sqz
