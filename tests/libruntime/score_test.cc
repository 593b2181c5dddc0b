#include "libruntime/select/score.h"

#include <gtest/gtest.h>

#include <cmath>

#include "formats/sqz_file.h"
#include "tests/libruntime/alive_mask.h"
#include "tests/libruntime/random_data.h"
#include "tests/libruntime/reference.h"

namespace sqz {
namespace {

struct ScoreCase {
  ScoreProblem problem;  // of the alive clusters
  std::vector<std::byte> centroids;
  testing::AliveMask alive;
  std::vector<uint32_t> sizes, alive_sizes;
  std::vector<ClusterRange> ranges;
  std::vector<float> queries;

  std::vector<double> expected() const {
    ScoreProblem all = problem;
    all.clusters = std::ssize(sizes);
    all.sizes = sizes.data();
    return testing::packed(reference::scores(all, alive), alive);
  }
};

// Sizes include empty clusters; `alive_share` of 10 clusters live.
ScoreCase make_case(DType dtype, int64_t dim, int64_t clusters, int64_t tokens, int64_t group,
                    int64_t alive_share, float query_scale = 1.5f) {
  testing::Random random(static_cast<uint64_t>(dim * 1000003 + clusters * 101 + tokens));
  ScoreCase c;
  c.centroids = testing::stored(dtype, random.normals(clusters * dim));
  c.queries = random.normals(tokens * group * dim, query_scale);
  for (int64_t j = 0; j < clusters; ++j) {
    c.sizes.push_back(static_cast<uint32_t>(random.below(40)));
    c.alive.push_back(random.below(10) < alive_share ? 1 : 0);
  }
  c.alive_sizes = testing::packed(c.sizes, c.alive);
  c.ranges = testing::ranges_of(c.alive);
  c.problem = {.dtype = dtype,
               .dim = dim,
               .clusters = std::ssize(c.alive_sizes),
               .ranges = c.ranges,
               .centroids = c.centroids.data(),
               .sizes = c.alive_sizes.data(),
               .queries = c.queries.data(),
               .tokens = tokens,
               .group = group,
               .scale = 1.0f / std::sqrt(static_cast<float>(dim))};
  return c;
}

std::vector<float> run(const ScoreProblem& problem, Code expected = Code::kOk) {
  std::vector<float> scores(problem.clusters, -7.0f);
  // NaN everywhere: nothing may depend on what the workspace held before.
  std::vector<float> workspace(score_workspace(problem), std::nanf(""));
  const Status status = score_clusters(problem, scores, workspace);
  EXPECT_EQ(status.code(), expected) << status.message();
  return scores;
}

void expect_near(const std::vector<float>& scores, const std::vector<double>& expected,
                 double tolerance) {
  ASSERT_EQ(scores.size(), expected.size());
  for (size_t j = 0; j < scores.size(); ++j) {
    if (std::isinf(expected[j])) {
      ASSERT_EQ(scores[j], expected[j]) << "cluster " << j;
    } else {
      ASSERT_NEAR(scores[j], expected[j], tolerance) << "cluster " << j;
    }
  }
}

TEST(Score, GroupsAndDeadClusters) {
  for (const int64_t group : {1, 2, 4, 7, 8}) {
    for (const int64_t tokens : {1, 2, 9, 65}) {
      for (const int64_t alive : {10, 6, 1}) {
        const ScoreCase c = make_case(DType::kBF16, 64, 133, tokens, group, alive);
        SCOPED_TRACE(concat("group ", group, " tokens ", tokens, " alive ", alive));
        expect_near(run(c.problem), c.expected(), 2e-5);
      }
    }
  }
}

TEST(Score, HugeLogitsStayOrderedAndFinite) {
  for (const int64_t tokens : {1, 20}) {
    // Logits near 1e4: exp() of them overflows, exp() of their differences underflows.
    ScoreCase c = make_case(DType::kF32, 64, 50, tokens, 2, 10, 2000.0f);
    const std::vector<double> expected = c.expected();
    const std::vector<float> scores = run(c.problem);
    int alive = 0;
    for (size_t j = 0; j < scores.size(); ++j) {
      ASSERT_FALSE(std::isnan(scores[j]));
      if (c.sizes[j] == 0) continue;
      ++alive;
      ASSERT_TRUE(std::isfinite(scores[j])) << "an underflow became minus infinity";
      if (expected[j] > -600) {
        ASSERT_NEAR(scores[j], expected[j], 0.02);
      }
    }
    ASSERT_GT(alive, 10);
    EXPECT_GT(*std::max_element(scores.begin(), scores.end()), -5.0f);
  }
}

TEST(Score, NanAndInfinityAreErrorsNotEmptySelections) {
  for (const int64_t tokens : {1, 30}) {
    for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
      ScoreCase c = make_case(DType::kF32, 64, 50, tokens, 2, 10);
      c.queries[c.queries.size() - 3] = bad;
      SCOPED_TRACE(concat("tokens ", tokens, " value ", bad));
      run(c.problem, Code::kNumeric);
    }
    // Finite numbers whose product is not.
    ScoreCase c = make_case(DType::kF32, 64, 50, tokens, 2, 10, 1e30f);
    std::vector<float> centroids(50 * 64, 1e30f);
    std::fill(c.queries.begin(), c.queries.end(), 1e30f);
    c.problem.centroids = centroids.data();
    run(c.problem, Code::kNumeric);
  }
}

TEST(Score, EmptyClustersScoreMinusInfinityWhateverTheirCentroids) {
  for (const int64_t tokens : {1, 20}) {
    ScoreCase c = make_case(DType::kF32, 64, 50, tokens, 2, 10);
    const std::vector<float> expected = run(c.problem);
    for (size_t j = 0; j < c.sizes.size(); ++j) {
      if (c.sizes[j] > 0) continue;
      EXPECT_EQ(expected[j], -INFINITY);
      std::fill_n(reinterpret_cast<float*>(c.centroids.data()) + j * 64, 64, std::nanf(""));
    }
    EXPECT_EQ(run(c.problem), expected);

    std::fill(c.alive_sizes.begin(), c.alive_sizes.end(), 0u);
    for (const float score : run(c.problem)) EXPECT_EQ(score, -INFINITY);
  }
}

// A file of as many buckets has 16 MB.
TEST(Score, ManyBucketsTakeLittleMemoryAThread) {
  const ClassifierView network = {.hidden = 1};
  ScoreProblem problem;
  problem.dim = 1;
  problem.group = 8;
  problem.clusters = 1 << 20;
  problem.network = &network;
  EXPECT_LT(4 * most_score_workspace(problem), 32 << 20);
}

}  // namespace
}  // namespace sqz
