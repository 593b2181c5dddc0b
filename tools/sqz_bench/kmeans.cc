#include "libindex/kmeans.h"

#include <cmath>

#include "formats/base/dtype.h"
#include "formats/base/parallel.h"
#include "tools/sqz_bench/benchmarks.h"

namespace sqz::bench {
namespace {

// The mean cosine of points and the centroids of their clusters, which k-means maximises.
double mean_cosine(const KmeansOptions& options, const std::vector<KmeansProblem>& problems) {
  double sum = 0;
  const int64_t dim = options.dim;
  std::vector<float> unit(static_cast<size_t>(options.points * dim));
  for (const KmeansProblem& problem : problems) {
    normalise_rows(problem.points, problem.count, dim, unit.data());
    std::vector<double> total(static_cast<size_t>(problem.clusters * dim));
    for (int64_t i = 0; i < problem.count * dim; ++i) {
      total[problem.assignment[i / dim] * dim + i % dim] += unit[i];
    }
    // The cosines of a cluster's points with their sum add up to the length of the sum.
    for (int64_t c = 0; c < problem.clusters; ++c) {
      double square = 0;
      for (int64_t i = c * dim; i < (c + 1) * dim; ++i) square += total[i] * total[i];
      sum += std::sqrt(square);
    }
  }
  return sum / static_cast<double>(options.points * options.heads);
}

void cluster(benchmark::State& state, const KmeansOptions& options,
             const std::vector<std::vector<float>>& points, KmeansEngine& engine) {
  std::vector<std::vector<int32_t>> assignments(static_cast<size_t>(options.heads));
  std::vector<KmeansProblem> problems;
  for (size_t head = 0; head < assignments.size(); ++head) {
    assignments[head].resize(static_cast<size_t>(options.points));
    problems.push_back({.points = points[head % points.size()].data(),
                        .count = options.points,
                        .dim = options.dim,
                        .clusters = options.cluster_count(),
                        .iterations = options.iterations,
                        .seed = options.seed + head,
                        .assignment = assignments[head].data()});
  }
  for (auto _ : state) {
    const Status status = engine.run(problems, options.threads, {});
    if (!status.ok()) return fail(state, status.message());
  }
  state.counters["flop_per_s"] =
      benchmark::Counter(options.flop(), benchmark::Counter::kIsIterationInvariantRate);
  state.counters["mean_cosine"] = mean_cosine(options, problems);
  state.SetLabel(engine.name());
}

}  // namespace

int64_t KmeansOptions::cluster_count() const {
  return std::max<int64_t>(1, std::llround(clusters * static_cast<double>(points)));
}

double KmeansOptions::flop() const {
  return 2.0 * (iterations + 1) * static_cast<double>(heads * points) *
         static_cast<double>(cluster_count() * dim);
}

std::vector<float> KmeansOptions::points_of(int64_t head) const {
  Random random(seed * 7919 + static_cast<uint64_t>(head % 8) + 1);
  std::vector<float> out(static_cast<size_t>(points * dim));
  for (float& x : out) x = to_float(to_bfloat16(normal(random)));
  return out;
}

Status add_kmeans(const KmeansOptions& options, const std::shared_ptr<const Device>& device) {
  const auto points = std::make_shared<std::vector<std::vector<float>>>();
  for (int64_t head = 0; head < std::min<int64_t>(options.heads, 8); ++head) {
    points->push_back(options.points_of(head));
  }
  const bool gpu = device->number() >= 0;
  const std::string name = gpu ? "cuda" : "faiss";
  SQZ_ASSIGN_OR_RETURN(const std::shared_ptr<KmeansEngine> engine,
                       make_kmeans_engine({name, options.dim, std::max(device->number(), 0)}));
  benchmark::RegisterBenchmark(
      ("kmeans/" + name).c_str(),
      [=](benchmark::State& state) { cluster(state, options, *points, *engine); })
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
  if (gpu) add_kmeans_kernels(options, device);
  return {};
}

}  // namespace sqz::bench
