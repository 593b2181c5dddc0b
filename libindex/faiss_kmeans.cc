// k-means through faiss::Clustering, with an assignment step of our own.
//
// FAISS's flat search threads inside one head, through BLAS, in blocks that spill out of the cache.
// Here each head has one thread, and products never leave the registers. A point's product is the
// same on however many threads and in whatever block it is found.
#include <faiss/Clustering.h>
#include <omp.h>

#include <limits>
#include <optional>

#include "libindex/lloyd.h"

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
    const Status status = find_nearest(*centroids_, x, n, d, threads_, products, labels);
    if (!status.ok()) throw std::bad_alloc();
  }

 private:
  int threads_;
  std::optional<NearestCentroids> centroids_;
};

// Without subsampling.
Result<std::vector<float>> train(const KmeansProblem& problem, const float* unit, int threads) {
  const SingleThreadedOpenMp openmp;
  FlatAssigner index(problem.dim, threads);
  faiss::ClusteringParameters parameters;
  parameters.niter = problem.iterations;
  parameters.spherical = true;
  parameters.min_points_per_centroid = 1;
  parameters.max_points_per_centroid = std::numeric_limits<int>::max();
  parameters.seed = static_cast<int>(problem.seed & 0x3fffffffu);
  faiss::Clustering clustering(static_cast<int>(problem.dim), static_cast<int>(problem.clusters),
                               parameters);
  clustering.train(problem.count, unit, index, problem.weights);
  return std::move(clustering.centroids);
}

}  // namespace

std::unique_ptr<KmeansEngine> make_faiss_kmeans() {
  return make_lloyd_kmeans(train);
}

}  // namespace sqz
