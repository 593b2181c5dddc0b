#include "libindex/cuda/kmeans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "libindex/cuda/layer/kernels.h"
#include "tests/libindex/cuda/capability.h"
#include "tests/libindex/cuda/device.h"

namespace sqz::cuda {
namespace {

using test::DeviceArray;
using test::dot;
using test::from_bf16;
using test::random_rows;
using test::to_bf16;

struct Outcome {
  std::vector<uint16_t> centroids;
  std::vector<uint32_t> labels, order, offsets;
  std::vector<float> cosines;
  uint32_t fault = 0;

  bool operator==(const Outcome&) const = default;
};

// One problem on the device: buffers, parameters, and what came out.
class Problem {
 public:
  Problem(KmeansShape shape, const std::vector<uint16_t>& points,
          const std::vector<uint32_t>& weights = {})
      : shape_(shape),
        rows_(static_cast<size_t>(shape.heads) * static_cast<size_t>(shape.points)),
        all_clusters_(static_cast<size_t>(shape.heads) * static_cast<size_t>(shape.clusters)),
        points_(points),
        weights_(weights.empty() ? std::vector<uint32_t>(1) : weights),
        centroids_(all_clusters_ * static_cast<size_t>(shape.dim)),
        labels_(rows_),
        order_(rows_),
        offsets_(all_clusters_ + static_cast<size_t>(shape.heads)),
        cosines_(rows_),
        fault_(1),
        workspace_(kmeans_workspace(shape).value()) {
    params.shape = shape;
    params.points = points_.get();
    if (!weights.empty()) params.weights = weights_.get();
    params.centroids = centroids_.get();
    params.labels = labels_.get();
    params.order = order_.get();
    params.offsets = offsets_.get();
    params.cosines = cosines_.get();
    params.fault = fault_.get();
    params.workspace = workspace_.get();
    params.workspace_bytes = kmeans_workspace(shape).value();
  }

  void set_centroids(const std::vector<uint16_t>& centroids) {
    ASSERT_EQ(cudaMemcpy(centroids_.get(), centroids.data(), centroids.size() * 2,
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }

  std::vector<uint32_t> assign() {
    const Status status = kmeans_assign(params, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    return labels_.host();
  }

  Outcome run() {
    const Status status = kmeans_run(params, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    return outcome();
  }

  Outcome outcome() {
    return {centroids_.host(), labels_.host(),  order_.host(),
            offsets_.host(),   cosines_.host(), fault_.host()[0]};
  }

  KmeansParams params;

 private:
  KmeansShape shape_;
  size_t rows_, all_clusters_;
  DeviceArray<uint16_t> points_;
  DeviceArray<uint32_t> weights_;
  DeviceArray<uint16_t> centroids_;
  DeviceArray<uint32_t> labels_, order_, offsets_;
  DeviceArray<float> cosines_;
  DeviceArray<uint32_t> fault_;
  DeviceArray<uint8_t> workspace_;
};

const uint16_t* row(const std::vector<uint16_t>& rows, size_t index, int dim) {
  return rows.data() + index * static_cast<size_t>(dim);
}

// The float64 arg-max; the lowest number wins ties.
uint32_t best_centroid(const uint16_t* point, const std::vector<uint16_t>& centroids, int64_t head,
                       const KmeansShape& shape) {
  uint32_t best = 0;
  double most = -INFINITY;
  for (int c = 0; c < shape.clusters; ++c) {
    const double product =
        dot(point, row(centroids, static_cast<size_t>(head * shape.clusters + c), shape.dim),
            shape.dim);
    if (product > most) {
      most = product;
      best = static_cast<uint32_t>(c);
    }
  }
  return best;
}

void expect_exact(const std::vector<uint32_t>& labels, const std::vector<uint16_t>& points,
                  const std::vector<uint16_t>& centroids, const KmeansShape& shape) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < int64_t{shape.heads} * shape.points; ++i) {
    const uint16_t* point = row(points, static_cast<size_t>(i), shape.dim);
    const uint32_t expected = best_centroid(point, centroids, i / shape.points, shape);
    const uint32_t found = labels[static_cast<size_t>(i)];
    if (found != expected && ++wrong <= 5) {
      ADD_FAILURE() << "head " << i / shape.points << " point " << i % shape.points << ": label "
                    << found << ", expected " << expected;
    }
  }
  EXPECT_EQ(wrong, 0) << shape.heads << " x " << shape.points << " x " << shape.dim << ", C "
                      << shape.clusters;
}

// Checks that hold for every result, whatever the points.
void expect_partition(const Outcome& out, const KmeansShape& shape) {
  const auto n = static_cast<size_t>(shape.points), c = static_cast<size_t>(shape.clusters);
  EXPECT_EQ(out.fault, 0u);
  for (size_t head = 0; head < static_cast<size_t>(shape.heads); ++head) {
    const uint32_t* offsets = out.offsets.data() + head * (c + 1);
    const uint32_t* order = out.order.data() + head * n;
    const uint32_t* labels = out.labels.data() + head * n;
    ASSERT_EQ(offsets[0], 0u);
    ASSERT_EQ(offsets[c], n);
    for (size_t k = 0; k < c; ++k) {
      ASSERT_LT(offsets[k], offsets[k + 1]) << "empty cluster " << k << " of head " << head;
      for (uint32_t i = offsets[k]; i < offsets[k + 1]; ++i) {
        ASSERT_LT(order[i], n);
        ASSERT_EQ(labels[order[i]], k);
        ASSERT_TRUE(i == offsets[k] || order[i - 1] < order[i]);
      }
    }
  }
  for (size_t k = 0; k < static_cast<size_t>(shape.heads) * c; ++k) {
    const uint16_t* centroid = row(out.centroids, k, shape.dim);
    ASSERT_NEAR(dot(centroid, centroid, shape.dim), 1, 0.02) << "centroid " << k;
  }
}

class AssignTest : public testing::TestWithParam<std::tuple<AssignKernel, int>> {
 protected:
  void SetUp() override {
    SQZ_SKIP_WITHOUT_GPU();
    if (kernel() == AssignKernel::kHopper && (!test::have_hopper() || dim() == 32)) {
      GTEST_SKIP() << "the Hopper kernel does not run here";
    }
  }
  AssignKernel kernel() const { return std::get<0>(GetParam()); }
  int dim() const { return std::get<1>(GetParam()); }

  void check(const KmeansShape& shape, const std::vector<uint16_t>& points,
             const std::vector<uint16_t>& centroids) {
    Problem problem(shape, points);
    problem.params.kernel = kernel();
    problem.set_centroids(centroids);
    expect_exact(problem.assign(), points, centroids, shape);
    const Outcome out = problem.outcome();
    for (size_t i = 0; i < out.labels.size(); ++i) {
      const uint16_t* point = row(points, i, shape.dim);
      const size_t head = i / static_cast<size_t>(shape.points);
      const size_t centroid = head * static_cast<size_t>(shape.clusters) + out.labels[i];
      ASSERT_LT(out.labels[i], static_cast<uint32_t>(shape.clusters));
      const double norm = std::sqrt(dot(point, point, shape.dim));
      const double cosine =
          norm == 0 ? 0 : dot(point, row(centroids, centroid, shape.dim), shape.dim) / norm;
      ASSERT_NEAR(out.cosines[i], cosine, 2e-4) << "point " << i;
    }
  }
};

std::vector<uint16_t> unit_rows(size_t rows, int dim, uint64_t seed) {
  auto values = random_rows(rows, dim, seed);
  for (size_t r = 0; r < rows; ++r) {
    uint16_t* v = values.data() + r * static_cast<size_t>(dim);
    const double norm = std::sqrt(dot(v, v, dim));
    for (int k = 0; k < dim; ++k) v[k] = to_bf16(from_bf16(v[k]) / norm);
  }
  return values;
}

TEST_P(AssignTest, ShapesThatNoTileDivides) {
  const std::tuple<int, int, int> shapes[] = {{1, 1, 1},     {2, 5, 3},      {1, 255, 127},
                                              {3, 257, 129}, {1, 1000, 97},  {2, 700, 385},
                                              {5, 64, 64},   {1, 3000, 1000}};
  uint64_t seed = 1;
  for (const auto& [heads, points, clusters] : shapes) {
    const KmeansShape shape{heads, points, dim(), clusters};
    seed += 2;
    check(shape, random_rows(static_cast<size_t>(heads * points), dim(), seed, 3.0),
          unit_rows(static_cast<size_t>(heads * clusters), dim(), seed + 1));
  }
}

// More blocks than the GPU has multiprocessors, rings that wrap around many times.
TEST_P(AssignTest, ManyBlocks) {
  const KmeansShape shape{3, 20000, dim(), 300};
  check(shape, random_rows(static_cast<size_t>(shape.heads * shape.points), dim(), 11),
        unit_rows(static_cast<size_t>(shape.heads * shape.clusters), dim(), 12));
}

TEST_P(AssignTest, EqualCentroidsGoToTheLowest) {
  const KmeansShape shape{2, 1500, dim(), 700};
  auto centroids = unit_rows(1400, dim(), 21);
  const auto d = static_cast<size_t>(dim());
  // Copies at every distance: in one tile, in the same lane's columns, tiles apart.
  for (size_t c = 0; c < 1400; ++c) {
    const size_t source = c - c % 700 + (c % 700) % 90;
    std::copy_n(centroids.begin() + static_cast<int64_t>(source * d), d,
                centroids.begin() + static_cast<int64_t>(c * d));
  }
  check(shape, random_rows(3000, dim(), 22), centroids);
}

// Centroids that differ in one last bit of one component: products apart by far less than what
// the tensor cores resolve.
TEST_P(AssignTest, NearTies) {
  const KmeansShape shape{1, 2000, dim(), 600};
  auto centroids = unit_rows(600, dim(), 31);
  const auto d = static_cast<size_t>(dim());
  std::mt19937_64 random(32);
  for (size_t c = 150; c < 600; ++c) {
    const size_t source = random() % 150;
    std::copy_n(centroids.begin() + static_cast<int64_t>(source * d), d,
                centroids.begin() + static_cast<int64_t>(c * d));
    centroids[c * d + random() % d] ^= 1;
  }
  auto points = random_rows(2000, dim(), 33);
  for (size_t i = 0; i < 2000; ++i) {  // near a centroid, and some components very small
    const size_t c = random() % 600;
    for (size_t k = 0; k < d; ++k) {
      const double noise = from_bf16(points[i * d + k]) * 0.02;
      points[i * d + k] = to_bf16((from_bf16(centroids[c * d + k]) + noise) * (k % 7 ? 1 : 1e-3));
    }
  }
  check(shape, points, centroids);
}

TEST_P(AssignTest, NegativeProductsAndZeroPoints) {
  const KmeansShape shape{1, 600, dim(), 200};
  auto centroids = unit_rows(200, dim(), 41);
  for (auto& value : centroids) value |= 0x8000;  // all in one orthant
  auto points = random_rows(600, dim(), 42);
  for (auto& value : points) value &= 0x7FFF;  // and the points in the opposite one
  std::fill_n(points.begin(), 40 * dim(), uint16_t{0});
  check(shape, points, centroids);
}

TEST_P(AssignTest, NormsFarFromOne) {
  const KmeansShape shape{1, 500, dim(), 130};
  auto points = random_rows(500, dim(), 51);
  for (size_t i = 0; i < points.size(); ++i) {
    const double scale =
        std::pow(10.0, static_cast<double>(i / static_cast<size_t>(dim()) % 25) - 12);
    points[i] = to_bf16(from_bf16(points[i]) * scale);
  }
  check(shape, points, unit_rows(130, dim(), 52));
}

std::string name_of(const testing::TestParamInfo<std::tuple<AssignKernel, int>>& test) {
  const char* const names[] = {"Auto", "Plain", "Hopper"};
  return names[static_cast<size_t>(std::get<0>(test.param))] +
         std::to_string(std::get<1>(test.param));
}

INSTANTIATE_TEST_SUITE_P(Kernels, AssignTest,
                         testing::Combine(testing::Values(AssignKernel::kPlain,
                                                          AssignKernel::kHopper),
                                          testing::Values(32, 64, 96, 128, 256)),
                         name_of);

// Clustered points: `groups` directions, noise around them.
std::vector<uint16_t> grouped_rows(size_t rows, int dim, size_t groups, uint64_t seed) {
  const auto centers = random_rows(groups, dim, seed);
  auto values = random_rows(rows, dim, seed + 1, 0.4);
  std::mt19937_64 random(seed + 2);
  for (size_t r = 0; r < rows; ++r) {
    const size_t g = random() % groups;
    for (size_t k = 0; k < static_cast<size_t>(dim); ++k) {
      auto& value = values[r * static_cast<size_t>(dim) + k];
      value = to_bf16(from_bf16(value) + from_bf16(centers[g * static_cast<size_t>(dim) + k]));
    }
  }
  return values;
}

// Normalised mean of normalised members, from labels, in float64.
std::vector<double> reference_centroid(const std::vector<uint16_t>& points, const Outcome& out,
                                       const KmeansShape& shape, size_t head, uint32_t cluster,
                                       const std::vector<uint32_t>& weights) {
  std::vector<double> sum(static_cast<size_t>(shape.dim));
  for (size_t i = 0; i < static_cast<size_t>(shape.points); ++i) {
    const size_t index = head * static_cast<size_t>(shape.points) + i;
    if (out.labels[index] != cluster) continue;
    const uint16_t* point = row(points, index, shape.dim);
    const double norm = std::sqrt(dot(point, point, shape.dim));
    const double weight = weights.empty() ? 1 : weights[index];
    for (size_t k = 0; k < sum.size(); ++k) sum[k] += weight * from_bf16(point[k]) / norm;
  }
  double square = 0;
  for (double v : sum) square += v * v;
  for (double& v : sum) v /= std::sqrt(square);
  return sum;
}

// After one iteration the centroids must be the means of the clusters that the first centroids
// give, and the labels exact for the new ones.
void check_one_iteration(const KmeansShape& shape, const std::vector<uint32_t>& weights) {
  const auto points =
      grouped_rows(static_cast<size_t>(shape.heads * shape.points), shape.dim, 40, 5);
  Problem problem(shape, points, weights);
  problem.params.seed = 9;
  problem.params.iterations = 0;
  const Outcome before = problem.run();  // labels of the first centroids
  problem.params.iterations = 1;
  const Outcome after = problem.run();
  expect_partition(after, shape);
  // Seeds are points, so no cluster of the first assignment is empty and nothing was moved.
  expect_exact(before.labels, points, before.centroids, shape);
  for (size_t head = 0; head < static_cast<size_t>(shape.heads); ++head) {
    for (uint32_t c = 0; c < static_cast<uint32_t>(shape.clusters); ++c) {
      const auto expected = reference_centroid(points, before, shape, head, c, weights);
      const uint16_t* centroid =
          row(after.centroids, head * static_cast<size_t>(shape.clusters) + c, shape.dim);
      for (size_t k = 0; k < expected.size(); ++k) {
        ASSERT_NEAR(from_bf16(centroid[k]), expected[k], std::abs(expected[k]) / 256 + 2e-6)
            << "head " << head << " cluster " << c << " component " << k;
      }
    }
  }
}

TEST(KmeansTest, OneIterationIsTheMean) {
  SQZ_SKIP_WITHOUT_GPU();
  for (int dim : {32, 64, 96, 128, 256}) check_one_iteration({2, 3000, dim, 60}, {});
  check_one_iteration({1, 9000, 64, 3}, {});  // clusters that a whole block sums
}

TEST(KmeansTest, WeightsMultiply) {
  SQZ_SKIP_WITHOUT_GPU();
  std::vector<uint32_t> weights(6000);
  std::mt19937_64 random(3);
  for (auto& weight : weights) weight = static_cast<uint32_t>(random() % 1000 + 1);
  weights[17] = 131072;
  check_one_iteration({2, 3000, 128, 60}, weights);
  weights.resize(6000);
  check_one_iteration({1, 6000, 96, 4}, weights);
}

// The mean cosine must not fall from iteration to iteration by more than what rounding of the
// centroids and refills take.
TEST(KmeansTest, ObjectiveRises) {
  SQZ_SKIP_WITHOUT_GPU();
  const KmeansShape shape{2, 8000, 64, 400};
  Problem problem(shape, grouped_rows(16000, 64, 700, 6));
  double last = -1;
  for (int iterations : {0, 1, 2, 4, 8}) {
    problem.params.iterations = iterations;
    const Outcome out = problem.run();
    expect_partition(out, shape);
    const double mean = std::accumulate(out.cosines.begin(), out.cosines.end(), 0.0) / 16000;
    EXPECT_GT(mean, last - 1e-3) << iterations;
    last = mean;
  }
  EXPECT_GT(last, 0.7);
}

TEST(KmeansTest, SameBytesFromRunToRunAndKernelToKernel) {
  SQZ_SKIP_WITHOUT_GPU();
  for (const int dim : {32, 64, 96, 128, 256}) {
    const KmeansShape shape{4, 6000, dim, 300};
    const auto points = grouped_rows(24000, dim, 500, 7);
    Problem problem(shape, points);
    const Outcome first = problem.run();
    const Outcome second = problem.run();
    EXPECT_TRUE(first == second);
    Problem plain(shape, points);
    plain.params.kernel = AssignKernel::kPlain;
    const Outcome other = plain.run();
    EXPECT_EQ(first.labels, other.labels);
    EXPECT_EQ(first.centroids, other.centroids);
    EXPECT_EQ(first.order, other.order);
    problem.params.seed = 1;
    EXPECT_NE(problem.run().labels, first.labels);
  }
}

// Without weights the sums of clusters of 40 points or more are kept from update to update and only
// changed; with weights every update adds all points. With weights of 1 both must give the same.
TEST(KmeansTest, KeptSumsAreWholeSums) {
  SQZ_SKIP_WITHOUT_GPU();
  const auto expect_same = [](const KmeansShape& shape, const std::vector<uint16_t>& points,
                              const char* what) {
    SCOPED_TRACE(what);
    const auto rows = static_cast<size_t>(shape.heads) * static_cast<size_t>(shape.points);
    Problem kept(shape, points), whole(shape, points, std::vector<uint32_t>(rows, 1));
    const Outcome out = kept.run();
    expect_partition(out, shape);
    EXPECT_TRUE(out == whole.run());
  };
  for (const int dim : {32, 64, 96, 128, 256}) {
    expect_same({3, 9001, dim, 150}, grouped_rows(27003, dim, 170, 15), "groups");
  }
  expect_same({2, 20000, 64, 11}, random_rows(40000, 64, 16), "large clusters, then smaller ones");
  expect_same({2, 12000, 64, 300}, random_rows(24000, 64, 17), "no structure");
  auto cone = random_rows(24000, 64, 18);
  for (size_t i = 0; i < 24000; ++i) {
    if (i % 3 == 0) continue;  // two thirds within a narrow cone: sizes from 0 to thousands
    for (size_t k = 0; k < 64; ++k) {
      cone[i * 64 + k] =
          to_bf16(10.0 * static_cast<double>(k % 3) + 0.01 * from_bf16(cone[i * 64 + k]));
    }
  }
  expect_same({2, 12000, 64, 250}, cone, "half in one cluster");
  for (size_t i = 0; i < 24000; ++i) {
    std::copy_n(cone.begin() + static_cast<int64_t>(i % 90) * 64, 64,
                cone.begin() + static_cast<int64_t>(i) * 64);
  }
  expect_same({2, 12000, 64, 250}, cone, "empty clusters");
}

TEST(KmeansTest, RunsInAGraphOnTwoStreams) {
  SQZ_SKIP_WITHOUT_GPU();
  const KmeansShape shape{3, 2000, 64, 150};
  Problem problem(shape, grouped_rows(6000, 64, 90, 8));
  const Outcome direct = problem.run();
  ASSERT_EQ(cudaStreamCreate(&problem.params.second_stream), cudaSuccess);
  const test::Captured graph(
      [&](cudaStream_t stream) { EXPECT_TRUE(kmeans_run(problem.params, stream).ok()); });
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(cudaMemset(problem.params.labels, 0xFF, 6000 * 4), cudaSuccess);
    graph.replay();
    EXPECT_TRUE(problem.outcome() == direct);
  }
  cudaStreamDestroy(problem.params.second_stream);
}

TEST(KmeansTest, DuplicatesStillFillEveryCluster) {
  SQZ_SKIP_WITHOUT_GPU();
  for (const int distinct : {1, 3, 50}) {
    const KmeansShape shape{2, 5000, 64, 256};
    auto points = random_rows(10000, 64, 10);
    for (size_t i = 0; i < 10000; ++i) {
      std::copy_n(points.begin() + static_cast<int64_t>(i % static_cast<size_t>(distinct)) * 64, 64,
                  points.begin() + static_cast<int64_t>(i) * 64);
    }
    Problem problem(shape, points);
    problem.params.iterations = 3;
    const Outcome out = problem.run();
    expect_partition(out, shape);
    if (distinct == 50) {  // each distinct point found a cluster of its own
      std::set<uint32_t> used(out.labels.begin(), out.labels.begin() + 50);
      EXPECT_EQ(used.size(), 50u);
    }
  }
}

TEST(KmeansArgumentsTest, WrongShapesNameTheField) {
  const auto message = [](KmeansShape shape) { return kmeans_workspace(shape).status().message(); };
  EXPECT_NE(message({1, 10, 64, 11}).find("clusters: found 11"), std::string::npos);
  EXPECT_NE(message({1, 10, 48, 5}).find("dim: found 48"), std::string::npos);
  EXPECT_NE(message({0, 10, 64, 5}).find("heads: found 0"), std::string::npos);
  EXPECT_NE(message({1, 0, 64, 5}).find("points: found 0"), std::string::npos);
  EXPECT_NE(message({1, 200000, 64, 140000}).find("clusters: found 140000"), std::string::npos);
  EXPECT_NE(message({4096, 1 << 20, 64, 5}).find("heads x points"), std::string::npos);
  KmeansParams params;
  params.shape = {1, 10, 64, 5};
  EXPECT_EQ(kmeans_run(params, nullptr).code(), Code::kInvalidArgument);
  EXPECT_EQ(gather_rows({1, 10, 12, nullptr, nullptr, nullptr}, nullptr).code(),
            Code::kInvalidArgument);
  const DepthFirstParams more_clusters_than_points{1, 3, 4};
  EXPECT_EQ(depth_first_order(more_clusters_than_points, nullptr).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace sqz::cuda
