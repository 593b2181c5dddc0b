// k-means through faiss::Clustering, with an assignment step of our own.
//
// FAISS's flat search threads inside one head, through BLAS, in blocks that spill out of the cache.
// Here each head has one thread, and products never leave the registers. A point's product is the
// same on however many threads and in whatever block it is found.
#include <faiss/Clustering.h>
#include <omp.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

#include "formats/base/parallel.h"
#include "libindex/kmeans.h"
#include "libindex/nearest.h"

namespace sqz {
namespace {

// faiss::Clustering's own loops (linear in the keys) must not start OpenMP threads.
class SingleThreadedOpenMp {
 public:
  SingleThreadedOpenMp() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleThreadedOpenMp() { omp_set_num_threads(before_); }
  SingleThreadedOpenMp(const SingleThreadedOpenMp&) = delete;
  SingleThreadedOpenMp& operator=(const SingleThreadedOpenMp&) = delete;

 private:
  int before_;
};

// Finds the centroid with the largest inner product; the lowest number among equals.
class FlatAssigner final : public faiss::Index {
 public:
  using idx_t = int64_t;  // FAISS's own name for it has moved between releases

  FlatAssigner(int64_t dim, int threads)
      : faiss::Index(dim, faiss::METRIC_INNER_PRODUCT), threads_(threads) {}

  void add(idx_t n, const float* x) override {
    centroids_.emplace(x, n, d);
    ntotal = n;
  }
  void reset() override {
    centroids_.reset();
    ntotal = 0;
  }
  void search(idx_t n, const float* x, idx_t /*k = 1*/, float* products, idx_t* labels,
              const faiss::SearchParameters*) const override {
    const Status status = parallel_for(threads_, threads_, [&](int64_t piece) {
      const int64_t first = n * piece / threads_, end = n * (piece + 1) / threads_;
      centroids_->find(x + first * d, end - first, products + first, labels + first);
      return Status();
    });
    if (!status.ok()) throw std::bad_alloc();
  }

 private:
  int threads_;
  std::optional<NearestCentroids> centroids_;
};

// Spherical k-means by faiss::Clustering, without subsampling. `index` finds the centroid with the
// largest inner product. May throw what FAISS throws.
Status lloyd(const KmeansProblem& problem, faiss::Index& index) {
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

  faiss::ClusteringParameters parameters;
  parameters.niter = problem.iterations;
  parameters.spherical = true;
  parameters.min_points_per_centroid = 1;
  parameters.max_points_per_centroid = std::numeric_limits<int>::max();
  parameters.seed = static_cast<int>(problem.seed & 0x3fffffffu);
  {
    faiss::Clustering clustering(static_cast<int>(problem.dim), static_cast<int>(problem.clusters),
                                 parameters);
    clustering.train(n, unit.data(), index, problem.weights);  // leaves the centroids in `index`
  }
  std::vector<float> products(static_cast<size_t>(n));
  std::vector<int64_t> labels(static_cast<size_t>(n));
  index.search(n, unit.data(), 1, products.data(), labels.data());
  std::transform(labels.begin(), labels.end(), problem.assignment,
                 [](int64_t label) { return static_cast<int32_t>(label); });
  refill_empty_clusters(unit.data(), n, problem.dim, problem.clusters, problem.assignment);
  return Status();
}

class FaissKmeans final : public KmeansEngine {
 public:
  std::string name() const override { return "faiss"; }

  Status run(std::span<const KmeansProblem> problems, int threads,
             const std::function<void()>& done) override {
    std::mutex mutex;
    auto solve_one = [&](const KmeansProblem& problem, int inner) {
      const SingleThreadedOpenMp openmp;
      FlatAssigner assigner(problem.dim, inner);
      SQZ_RETURN_IF_ERROR(lloyd(problem, assigner));
      const std::lock_guard lock(mutex);
      if (done) done();
      return Status();
    };
    // As many heads as fill all threads, a thread each; then the rest, all threads on each.
    const int64_t count = static_cast<int64_t>(problems.size());
    const int64_t whole = count - count % threads;
    SQZ_RETURN_IF_ERROR(
        parallel_for(whole, threads, [&](int64_t i) { return solve_one(problems[i], 1); }));
    return parallel_for(count - whole, 1,
                        [&](int64_t i) { return solve_one(problems[whole + i], threads); });
  }
};

}  // namespace

std::unique_ptr<KmeansEngine> make_faiss_kmeans() {
  return std::make_unique<FaissKmeans>();
}

}  // namespace sqz
