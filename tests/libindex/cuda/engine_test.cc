// The engine "cuda": why it is missing where it is, and its labels beside the CPU engine's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "libruntime/cuda/device.h"
#include "tests/libindex/cuda/capability.h"
#include "tests/libindex/cuda/device.h"
#include "tests/libindex/kmeans_cost.h"

namespace sqz {
namespace {

using cuda::DeviceProbe;
using test::clustered_points;

TEST(CudaDevice, SaysWhyItCannotBeUsed) {
  const DeviceProbe good{cudaSuccess, 2, 13000, 13000, 9, 0, "GPU X"};
  EXPECT_TRUE(cuda::check_probe(good, 0).ok());
  EXPECT_TRUE(cuda::check_probe(good, 1).ok());
  const auto expect = [&](const char* why, int gpu, const auto& change) {
    DeviceProbe probe = good;
    change(probe);
    const Status status = cuda::check_probe(probe, gpu);
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  };
  expect("no NVIDIA driver", 0, [](DeviceProbe& p) {
    p.driver_version = 0;
    p.error = cudaErrorInsufficientDriver;
  });
  expect("too old: it has CUDA 12.4, this sqz was built with 13.0", 0, [](DeviceProbe& p) {
    p.driver_version = 12040;
    p.error = cudaErrorInsufficientDriver;
  });
  expect("no NVIDIA GPU", 0, [](DeviceProbe& p) { p.error = cudaErrorNoDevice; });
  expect("no NVIDIA GPU", 0, [](DeviceProbe& p) { p.count = 0; });
  expect("no CUDA device 2; found 2", 2, [](DeviceProbe&) {});
  expect("cannot be used", 0, [](DeviceProbe& p) { p.error = cudaErrorDevicesUnavailable; });
  expect("GPU X has compute capability 7.5", 0, [](DeviceProbe& p) {
    p.major = 7;
    p.minor = 5;
  });
}

TEST(CudaEngine, MissingWithoutAGpu) {
  if (cuda::test::have_gpu()) GTEST_SKIP() << "this machine has a GPU";
  const auto engine = make_kmeans_engine({"cuda", 64, 0});
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.status().code(), Code::kInvalidArgument);
  EXPECT_NE(engine.status().message().find("no NVIDIA"), std::string::npos)
      << engine.status().message();
  EXPECT_EQ(make_kmeans_engine({"auto", 64, 0}).value()->name(), "faiss");
}

TEST(CudaEngine, AutoTakesItWhereItCan) {
  SQZ_SKIP_WITHOUT_GPU();
  EXPECT_EQ(make_kmeans_engine({"auto", 64, 0}).value()->name().rfind("cuda (", 0), 0u);
  EXPECT_EQ(make_kmeans_engine({"auto", 300, 0}).value()->name(), "faiss");
  EXPECT_EQ(make_kmeans_engine({"cuda", 300, 0}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(make_kmeans_engine({"cuda", 64, 99}).status().code(), Code::kInvalidArgument);
}

struct Heads {
  std::vector<std::vector<float>> points, weights;
  int64_t dim = 0, clusters = 0;
};

std::vector<std::vector<int32_t>> labels_of(KmeansEngine& engine, const Heads& heads) {
  std::vector<std::vector<int32_t>> labels;
  std::vector<KmeansProblem> problems;
  for (const auto& points : heads.points) {
    labels.emplace_back(points.size() / static_cast<size_t>(heads.dim), -1);
  }
  for (size_t h = 0; h < heads.points.size(); ++h) {
    problems.push_back({heads.points[h].data(),
                        heads.weights.empty() ? nullptr : heads.weights[h].data(),
                        static_cast<int64_t>(labels[h].size()), heads.dim, heads.clusters, 10,
                        7 + h, labels[h].data()});
  }
  size_t done = 0;
  const Status status = engine.run(problems, 4, [&] { ++done; });
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(done, problems.size());
  return labels;
}

double cost(const Heads& heads, const std::vector<std::vector<int32_t>>& labels) {
  double total = 0;
  for (size_t h = 0; h < heads.points.size(); ++h) {
    total += test::kmeans_cost(test::normalised(heads.points[h], heads.dim), heads.dim, labels[h],
                               heads.clusters,
                               heads.weights.empty() ? std::vector<float>() : heads.weights[h]);
  }
  return total;
}

void expect_no_empty_cluster(const Heads& heads, const std::vector<std::vector<int32_t>>& labels) {
  for (const auto& head : labels) {
    for (const int64_t size : test::sizes_of(head, heads.clusters)) EXPECT_GT(size, 0);
  }
}

TEST(CudaEngine, ObjectiveIsThatOfFaiss) {
  SQZ_SKIP_WITHOUT_GPU();
  const auto faiss = make_faiss_kmeans();
  const auto engine = make_cuda_kmeans(64, 0).value();
  for (const bool weighted : {false, true}) {
    Heads heads{{}, {}, 64, 400};
    test::Rng rng(5);
    for (uint64_t h = 0; h < 24; ++h) {
      heads.points.push_back(clustered_points(8000, 64, 700, 0.8f, 50 + h));
      if (!weighted) continue;
      heads.weights.emplace_back(8000);
      for (float& w : heads.weights.back()) w = static_cast<float>(1 + rng.below(40));
    }
    const double reference = cost(heads, labels_of(*faiss, heads));
    const auto labels = labels_of(*engine, heads);
    expect_no_empty_cluster(heads, labels);
    const double ours = cost(heads, labels);
    std::printf("%s objective, cuda / faiss: %.6f\n", weighted ? "weighted" : "plain",
                ours / reference);
    EXPECT_LE(ours, 1.001 * reference);
    EXPECT_GE(ours, 0.97 * reference) << "the two do not measure the same thing";
  }
}

TEST(CudaEngine, AnyShape) {
  SQZ_SKIP_WITHOUT_GPU();
  struct Shape {
    int64_t heads, count, dim, clusters;
  };
  const Shape shapes[] = {{3, 1000, 8, 50},   {1, 777, 24, 31},  {2, 129, 40, 129},
                          {2, 500, 72, 1},    {1, 2, 128, 2},    {2, 3001, 96, 333},
                          {1, 1030, 104, 99}, {1, 600, 256, 61}, {5, 64, 32, 63}};
  for (const Shape& shape : shapes) {
    Heads heads{{}, {}, shape.dim, shape.clusters};
    for (int64_t h = 0; h < shape.heads; ++h) {
      heads.points.push_back(clustered_points(shape.count, shape.dim,
                                              std::max<int64_t>(2, shape.clusters / 2), 0.7f,
                                              static_cast<uint64_t>(90 + h)));
    }
    SCOPED_TRACE(concat(shape.heads, " x ", shape.count, " x ", shape.dim, ", C ", shape.clusters));
    const auto labels = labels_of(*make_cuda_kmeans(shape.dim, 0).value(), heads);
    expect_no_empty_cluster(heads, labels);
    const auto reference = labels_of(*make_faiss_kmeans(), heads);
    EXPECT_LE(cost(heads, labels),
              1.1 * cost(heads, reference) + 0.01 * static_cast<double>(shape.count));
  }
}

TEST(CudaEngine, SameLabelsAloneAndInABatch) {
  SQZ_SKIP_WITHOUT_GPU();
  const auto engine = make_cuda_kmeans(64, 0).value();
  Heads heads{{}, {}, 64, 120};
  for (uint64_t h = 0; h < 5; ++h) {
    heads.points.push_back(clustered_points(h == 3 ? 2500 : 2600, 64, 90, 0.8f, 20 + h));
  }
  const auto batch = labels_of(*engine, heads);
  EXPECT_EQ(labels_of(*engine, heads), batch);
  for (size_t h = 0; h < 5; ++h) {
    std::vector<int32_t> alone(batch[h].size());
    const KmeansProblem problem{heads.points[h].data(),
                                nullptr,
                                static_cast<int64_t>(alone.size()),
                                64,
                                120,
                                10,
                                7 + h,
                                alone.data()};
    ASSERT_TRUE(engine->run({&problem, 1}, 1, {}).ok());
    EXPECT_EQ(alone, batch[h]) << "head " << h;
  }
}

TEST(CudaEngine, RefusesWhatIsNotFinite) {
  SQZ_SKIP_WITHOUT_GPU();
  const auto engine = make_cuda_kmeans(64, 0).value();
  for (const float bad : {std::nanf(""), INFINITY, 3e38f}) {
    std::vector<float> points = clustered_points(300, 64, 5, 0.7f, 1);
    points[1234] = bad;
    std::vector<int32_t> labels(300);
    const KmeansProblem problem{points.data(), nullptr, 300, 64, 10, 10, 1, labels.data()};
    EXPECT_EQ(engine->run({&problem, 1}, 1, {}).code(), Code::kNumeric) << bad;
  }
  std::vector<float> points = clustered_points(300, 64, 5, 0.7f, 1);
  std::vector<int32_t> labels(300);
  const KmeansProblem problem{points.data(), nullptr, 300, 64, 301, 10, 1, labels.data()};
  EXPECT_EQ(engine->run({&problem, 1}, 1, {}).code(), Code::kInternal);
}

}  // namespace
}  // namespace sqz
