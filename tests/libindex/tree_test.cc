// The centroid tree and the slot order made from it.
#include "libindex/tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "libindex/order.h"
#include "tests/libindex/clustered_data.h"

namespace sqz::tree_test {

constexpr int64_t kKeys = 900, kDim = 12, kHeads = 3;

struct Built {
  std::vector<std::vector<float>> keys;
  std::vector<HeadTree> trees;
};

Built build(const std::vector<int64_t>& clusters, int threads = 2) {
  Built built;
  std::vector<const float*> heads;
  for (uint64_t h = 0; h < kHeads; ++h) {
    built.keys.push_back(test::clustered_points(kKeys, kDim, 30, 0.6f, 40 + h));
  }
  for (const auto& keys : built.keys) heads.push_back(keys.data());
  TreeOptions options;
  options.clusters = clusters;
  options.threads = threads;
  auto trees = build_trees(*make_faiss_kmeans(), heads, kKeys, kDim, options, {});
  EXPECT_TRUE(trees.ok()) << trees.status().message();
  built.trees = std::move(trees).value();
  return built;
}

// The cluster of level k above each key.
std::vector<int32_t> ancestors(const HeadTree& tree, size_t k) {
  std::vector<int32_t> cluster = tree.parents.back();
  for (size_t level = tree.parents.size() - 1; level > k; --level) {
    for (int32_t& c : cluster) c = tree.parents[level - 1][c];
  }
  return cluster;
}

class Trees : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(Trees, OrderNestsAndPermutes) {
  const Built built = build(GetParam());
  const size_t levels = GetParam().size();
  for (const HeadTree& tree : built.trees) {
    const SlotOrder order = depth_first_order(tree, kDim);
    ASSERT_EQ(order.offsets.size(), levels);
    for (size_t k = 0; k < levels; ++k) {
      const std::vector<uint32_t>& offsets = order.offsets[k];
      ASSERT_EQ(offsets.size(), static_cast<size_t>(GetParam()[k] + 1));
      EXPECT_EQ(offsets.front(), 0u);
      EXPECT_EQ(offsets.back(), k + 1 < levels ? GetParam()[k + 1] : kKeys);
      for (size_t i = 1; i < offsets.size(); ++i) EXPECT_LT(offsets[i - 1], offsets[i]);
    }
    std::vector<uint32_t> sorted = order.keys;
    std::sort(sorted.begin(), sorted.end());
    std::vector<uint32_t> all(kKeys);
    std::iota(all.begin(), all.end(), 0u);
    EXPECT_EQ(sorted, all);

    // A run of slots of one cluster holds the keys of one cluster of the tree, all of them.
    const auto slots = first_slots(order.offsets);
    for (size_t k = 0; k < levels; ++k) {
      const std::vector<int32_t> cluster = ancestors(tree, k);
      std::vector<bool> seen(static_cast<size_t>(GetParam()[k]), false);
      EXPECT_EQ(slots[k].back(), static_cast<uint32_t>(kKeys));
      for (size_t i = 0; i + 1 < slots[k].size(); ++i) {
        const int32_t label = cluster[order.keys[slots[k][i]]];
        EXPECT_FALSE(seen[label]) << "cluster " << label << " is in two runs";
        seen[label] = true;
        for (uint32_t s = slots[k][i]; s < slots[k][i + 1]; ++s) {
          EXPECT_EQ(cluster[order.keys[s]], label);
          const bool has_previous = k + 1 == levels && s > slots[k][i];
          EXPECT_TRUE(!has_previous || order.keys[s - 1] < order.keys[s]);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, Trees,
                         ::testing::Values(std::vector<int64_t>{45}, std::vector<int64_t>{9, 45},
                                           std::vector<int64_t>{5, 20, 90},
                                           std::vector<int64_t>{1, 1, 1, kKeys},
                                           std::vector<int64_t>{45, 45}));

// Notes what it is asked; child i goes to cluster i mod C.
class RecordingEngine : public KmeansEngine {
 public:
  std::string name() const override { return "recording"; }
  Status run(std::span<const KmeansProblem> problems, int, const std::function<void()>&) override {
    for (const KmeansProblem& p : problems) {
      asked.push_back(p);
      points.emplace_back(p.points, p.points + p.count * p.dim);
      weights.emplace_back();
      if (p.weights != nullptr) weights.back().assign(p.weights, p.weights + p.count);
      for (int64_t i = 0; i < p.count; ++i) {
        p.assignment[i] = static_cast<int32_t>(i % p.clusters);
      }
    }
    return {};
  }
  std::vector<KmeansProblem> asked;
  std::vector<std::vector<float>> points, weights;
};

TEST(Tree, UpperLevelsClusterMeansWeightedByTheirKeys) {
  RecordingEngine engine;
  const std::vector<float> keys = {1, 2, 3, 4, 5, 6, 70};  // 7 keys of one dimension
  const std::vector<const float*> heads = {keys.data(), keys.data()};
  TreeOptions options;
  options.clusters = {1, 2, 5};
  options.layer = 3;
  ASSERT_TRUE(build_trees(engine, heads, 7, 1, options, {}).ok());
  ASSERT_EQ(engine.asked.size(), 6u);  // three levels, finest first, of two heads each
  EXPECT_EQ(engine.points[0], keys);
  EXPECT_TRUE(engine.weights[0].empty());
  EXPECT_EQ(engine.points[2], (std::vector<float>{3.5f, 36, 3, 4, 5}));
  EXPECT_EQ(engine.weights[2], (std::vector<float>{2, 2, 1, 1, 1}));
  EXPECT_EQ(engine.points[4], (std::vector<float>{15 / 4.0f, 76 / 3.0f}));
  EXPECT_EQ(engine.weights[4], (std::vector<float>{4, 3}));
  for (size_t a = 0; a < 6; ++a) {
    for (size_t b = 0; b < a; ++b) EXPECT_NE(engine.asked[a].seed, engine.asked[b].seed);
  }
}

TEST(Tree, CountsAreClampedByTheLevelBelow) {
  const std::vector<double> fractions = {0.01, 0.05};
  EXPECT_EQ(cluster_counts(fractions, 10000, 9884), (std::vector<int64_t>{100, 500}));
  EXPECT_EQ(cluster_counts(fractions, 1049, 933), (std::vector<int64_t>{10, 52}));
  EXPECT_EQ(cluster_counts(fractions, 118, 2), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(cluster_counts(fractions, 5, 3), (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(cluster_counts(std::vector<double>{0.5, 1.0}, 100, 30), (std::vector<int64_t>{30, 30}));
}

// Clusters on a circle, numbered at random: a chain of nearest neighbours walks round it.
TEST(Order, SiblingsFollowTheirNearestNeighbour) {
  constexpr int kClusters = 24;
  HeadTree tree;
  tree.parents.resize(1);
  tree.means.resize(1);
  std::vector<int> place(kClusters);
  for (int i = 0; i < kClusters; ++i) {
    place[i] = i * 7 % kClusters;  // 7 and 24 have no common divisor
    const double angle = 2 * 3.14159265358979 * place[i] / kClusters;
    tree.means[0].push_back(static_cast<float>(std::cos(angle)));
    tree.means[0].push_back(static_cast<float>(std::sin(angle)));
    tree.parents[0].push_back(i);
  }
  const SlotOrder order = depth_first_order(tree, 2);
  for (int s = 1; s < kClusters; ++s) {
    const int step = std::abs(place[order.keys[s]] - place[order.keys[s - 1]]);
    EXPECT_TRUE(step == 1 || step == kClusters - 1) << "slot " << s << " jumps " << step;
  }
}

}  // namespace sqz::tree_test
