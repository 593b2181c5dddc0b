// The centroid tree. builder_test checks what is stored of it, and the order of slots.
#include "libindex/tree.h"

#include <gtest/gtest.h>

namespace sqz::tree_test {

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

}  // namespace sqz::tree_test
