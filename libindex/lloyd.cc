#include "libindex/lloyd.h"

#include <algorithm>
#include <mutex>
#include <numeric>

#include "formats/base/parallel.h"

namespace sqz {
namespace {

Status solve(const KmeansProblem& problem, LloydTrainer train, int threads) {
  const int64_t n = problem.count;
  if (problem.clusters < 1 || problem.clusters > n || problem.iterations < 1) {
    return Status(Code::kInternal, concat("k-means of ", n, " points into ", problem.clusters));
  }
  if (problem.clusters == 1) {
    std::fill(problem.assignment, problem.assignment + n, 0);
    return Status();
  }
  if (problem.clusters == n) {
    std::iota(problem.assignment, problem.assignment + n, 0);
    return Status();
  }
  std::vector<float> unit(static_cast<size_t>(n * problem.dim));
  normalise_rows(problem.points, n, problem.dim, unit.data());
  SQZ_ASSIGN_OR_RETURN(const std::vector<float> trained, train(problem, unit.data(), threads));
  const NearestCentroids centroids(trained.data(), problem.clusters, problem.dim);
  std::vector<float> products(static_cast<size_t>(n));
  std::vector<int64_t> labels(static_cast<size_t>(n));
  SQZ_RETURN_IF_ERROR(find_nearest(centroids, unit.data(), n, problem.dim, threads, products.data(),
                                   labels.data()));
  std::transform(labels.begin(), labels.end(), problem.assignment,
                 [](int64_t label) { return static_cast<int32_t>(label); });
  refill_empty_clusters(unit.data(), n, problem.dim, problem.clusters, problem.assignment);
  return Status();
}

class LloydKmeans final : public KmeansEngine {
 public:
  explicit LloydKmeans(LloydTrainer train) : train_(train) {}

  // The name is written to no file, and both trainers give the same bytes.
  std::string name() const override { return "faiss"; }

  Status run(std::span<const KmeansProblem> problems, int threads,
             const std::function<void()>& done) override {
    std::mutex mutex;
    auto solve_one = [&](const KmeansProblem& problem, int inner) {
      SQZ_RETURN_IF_ERROR(solve(problem, train_, inner));
      const std::lock_guard lock(mutex);
      if (done) done();
      return Status();
    };
    const int64_t count = static_cast<int64_t>(problems.size());
    const int64_t whole = count - count % threads;
    SQZ_RETURN_IF_ERROR(
        parallel_for(whole, threads, [&](int64_t i) { return solve_one(problems[i], 1); }));
    return parallel_for(count - whole, 1,
                        [&](int64_t i) { return solve_one(problems[whole + i], threads); });
  }

 private:
  LloydTrainer train_;
};

}  // namespace

std::unique_ptr<KmeansEngine> make_lloyd_kmeans(LloydTrainer trainer) {
  return std::make_unique<LloydKmeans>(trainer);
}

Status find_nearest(const NearestCentroids& centroids, const float* points, int64_t n, int64_t dim,
                    int threads, float* products, int64_t* labels) {
  return parallel_for(threads, threads, [&](int64_t piece) {
    const int64_t first = n * piece / threads, end = n * (piece + 1) / threads;
    centroids.find(points + first * dim, end - first, products + first, labels + first);
    return Status();
  });
}

}  // namespace sqz
