// k-means through faiss::Clustering, with an assignment step of our own.
//
// FAISS's flat search threads inside one head, through BLAS, in blocks that spill out of the cache.
// Here each head has one thread, and products are consumed block by block while they are in the
// cache. Blocks have a fixed size, so the bits do not depend on how many threads share them.
#include <dlfcn.h>
#include <faiss/Clustering.h>
#include <faiss/Index.h>
#include <omp.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <vector>

#include "libindex/kmeans.h"
#include "libindex/parallel.h"

extern "C" int sgemm_(const char* transa, const char* transb, const int* m, const int* n,
                      const int* k, const float* alpha, const float* a, const int* lda,
                      const float* b, const int* ldb, const float* beta, float* c, const int* ldc);

namespace sqz {
namespace {

// A block of products, 256 x 1024 floats = 1 MiB, stays in the second-level cache.
constexpr int64_t kRowBlock = 256;
constexpr int64_t kCentroidBlock = 1024;
constexpr int64_t kLanes = 32;

// OpenBLAS splits a product among its own threads, with other bits, unless it has one thread. The
// setting belongs to the process, so users are counted and the last one restores it.
class SingleThreadedBlas {
 public:
  SingleThreadedBlas() {
    const std::lock_guard lock(mutex_);
    if (users_++ > 0) return;
    const auto get = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "openblas_get_num_threads"));
    before_ = get != nullptr ? get() : 0;  // 0: another BLAS
    set(1);
  }
  ~SingleThreadedBlas() {
    const std::lock_guard lock(mutex_);
    if (--users_ == 0 && before_ > 0) set(before_);
  }
  SingleThreadedBlas(const SingleThreadedBlas&) = delete;
  SingleThreadedBlas& operator=(const SingleThreadedBlas&) = delete;

 private:
  static void set(int threads) {
    const auto call =
        reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
    if (call != nullptr) call(threads);
  }
  static inline std::mutex mutex_;
  static inline int users_ = 0, before_ = 0;
};

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

// A maximum is exact: these differ in speed alone.
[[gnu::always_inline]] inline float maximum_of(const float* x, int64_t count) {
  float lane[kLanes];
  std::fill(lane, lane + kLanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
  }
  for (; i < count; ++i) lane[0] = std::max(lane[0], x[i]);
  return *std::max_element(lane, lane + kLanes);
}

float maximum_baseline(const float* x, int64_t count) {
  return maximum_of(x, count);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] float maximum_avx2(const float* x, int64_t count) {
  return maximum_of(x, count);
}
const auto maximum = __builtin_cpu_supports("avx2") ? maximum_avx2 : maximum_baseline;
#else
const auto maximum = maximum_baseline;
#endif

// Finds the centroid with the largest inner product; the lowest number among equals.
class FlatAssigner final : public faiss::Index {
 public:
  using idx_t = int64_t;  // FAISS's own name for it has moved between releases

  FlatAssigner(int64_t dim, int threads)
      : faiss::Index(dim, faiss::METRIC_INNER_PRODUCT), threads_(threads) {}

  void add(idx_t n, const float* x) override {
    centroids_.insert(centroids_.end(), x, x + n * d);
    ntotal += n;
  }
  void reset() override {
    centroids_.clear();
    ntotal = 0;
  }
  void search(idx_t n, const float* x, idx_t /*k = 1*/, float* products, idx_t* labels,
              const faiss::SearchParameters*) const override {
    const int64_t blocks = (n + kRowBlock - 1) / kRowBlock;
    const int64_t pieces = std::min<int64_t>(threads_, blocks);
    const Status status = parallel_for(pieces, threads_, [&](int64_t piece) {
      std::vector<float> workspace(kRowBlock * kCentroidBlock);
      for (int64_t b = blocks * piece / pieces; b < blocks * (piece + 1) / pieces; ++b) {
        const int64_t first = b * kRowBlock;
        assign_block(x + first * d, std::min(kRowBlock, n - first), workspace.data(),
                     products + first, labels + first);
      }
      return Status();
    });
    if (!status.ok()) throw std::bad_alloc();
  }

 private:
  void assign_block(const float* x, int64_t rows, float* workspace, float* products,
                    idx_t* labels) const {
    std::fill(products, products + rows, -std::numeric_limits<float>::infinity());
    std::fill(labels, labels + rows, 0);
    const int dim = static_cast<int>(d), n = static_cast<int>(rows);
    const float one = 1, zero = 0;
    for (int64_t first = 0; first < ntotal; first += kCentroidBlock) {
      const int m = static_cast<int>(std::min(kCentroidBlock, ntotal - first));
      sgemm_("T", "N", &m, &n, &dim, &one, centroids_.data() + first * d, &dim, x, &dim, &zero,
             workspace, &m);
      for (int64_t r = 0; r < rows; ++r) {
        const float* row = workspace + r * m;
        const float best = maximum(row, m);
        if (!(best > products[r])) continue;
        products[r] = best;
        labels[r] = first + (std::find(row, row + m, best) - row);
      }
    }
  }

  int threads_;
  std::vector<float> centroids_;
};

Status solve(const KmeansProblem& problem, int threads) {
  const int64_t n = problem.count;
  if (problem.clusters < 1 || problem.clusters > n || problem.iterations < 1) {
    return Status(Code::kInternal, concat("k-means of ", n, " points into ", problem.clusters));
  }
  if (problem.clusters == 1) {
    std::fill(problem.assignment, problem.assignment + n, 0);
    return Status();
  }
  if (problem.clusters == n) {
    for (int64_t i = 0; i < n; ++i) problem.assignment[i] = static_cast<int32_t>(i);
    return Status();
  }
  std::vector<float> unit(static_cast<size_t>(n * problem.dim));
  normalise_rows(problem.points, n, problem.dim, unit.data());

  const SingleThreadedOpenMp openmp;
  faiss::ClusteringParameters parameters;
  parameters.niter = problem.iterations;
  parameters.spherical = true;
  parameters.min_points_per_centroid = 1;
  parameters.max_points_per_centroid = std::numeric_limits<int>::max();
  parameters.seed = static_cast<int>(problem.seed & 0x3fffffffu);
  FlatAssigner assigner(problem.dim, threads);
  {
    faiss::Clustering clustering(static_cast<int>(problem.dim), static_cast<int>(problem.clusters),
                                 parameters);
    clustering.train(n, unit.data(), assigner, problem.weights);
  }
  std::vector<float> products(static_cast<size_t>(n));
  std::vector<int64_t> labels(static_cast<size_t>(n));
  assigner.search(n, unit.data(), 1, products.data(), labels.data(), nullptr);
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
    const SingleThreadedBlas blas;
    std::mutex mutex;
    auto solve_one = [&](const KmeansProblem& problem, int inner) {
      SQZ_RETURN_IF_ERROR(solve(problem, inner));
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
