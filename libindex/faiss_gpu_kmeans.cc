// k-means through faiss::Clustering over FAISS's exact flat index on a GPU. Compiled where the
// FAISS that CMake found has GPU support (docs/kmeans-gpu.md).
#include <faiss/Clustering.h>
#include <faiss/gpu/GpuIndexFlat.h>
#include <faiss/gpu/StandardGpuResources.h>
#include <faiss/gpu/utils/DeviceUtils.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <numeric>
#include <vector>

#include "libindex/kmeans.h"

namespace sqz {
namespace {

class FaissGpuKmeans final : public KmeansEngine {
 public:
  explicit FaissGpuKmeans(int gpu) : gpu_(gpu) {}

  std::string name() const override { return "faiss-gpu"; }

  Status run(std::span<const KmeansProblem> problems, int /*threads*/,
             const std::function<void()>& done) override {
    for (const KmeansProblem& problem : problems) {
      try {
        SQZ_RETURN_IF_ERROR(solve(problem));
      } catch (const std::exception& error) {
        const std::string what = error.what();
        const bool memory = what.find("emory") != std::string::npos;
        return Status(memory ? Code::kOutOfMemory : Code::kInternal, "faiss-gpu: " + what);
      }
      if (done) done();
    }
    return Status();
  }

 private:
  Status solve(const KmeansProblem& problem) {
    const int64_t n = problem.count;
    if (problem.clusters < 1 || problem.clusters > n || problem.iterations < 1) {
      return Status(Code::kInternal, concat("k-means of ", n, " points into ", problem.clusters));
    }
    if (problem.clusters == n) {
      std::iota(problem.assignment, problem.assignment + n, 0);
      return Status();
    }
    std::vector<float> unit(static_cast<size_t>(n * problem.dim));
    normalise_rows(problem.points, n, problem.dim, unit.data());

    faiss::gpu::GpuIndexFlatConfig config;
    config.device = gpu_;
    faiss::gpu::GpuIndexFlatIP index(&resources_, static_cast<int>(problem.dim), config);
    faiss::ClusteringParameters parameters;
    parameters.niter = problem.iterations;
    parameters.spherical = true;
    parameters.min_points_per_centroid = 1;
    parameters.max_points_per_centroid = std::numeric_limits<int>::max();
    parameters.seed = static_cast<int>(problem.seed & 0x3fffffffu);
    faiss::Clustering clustering(static_cast<int>(problem.dim), static_cast<int>(problem.clusters),
                                 parameters);
    clustering.train(n, unit.data(), index, problem.weights);  // leaves the centroids in `index`

    std::vector<float> products(static_cast<size_t>(n));
    std::vector<faiss::idx_t> labels(static_cast<size_t>(n));
    index.search(n, unit.data(), 1, products.data(), labels.data());
    std::transform(labels.begin(), labels.end(), problem.assignment,
                   [](faiss::idx_t label) { return static_cast<int32_t>(label); });
    refill_empty_clusters(unit.data(), n, problem.dim, problem.clusters, problem.assignment);
    return Status();
  }

  int gpu_;
  faiss::gpu::StandardGpuResources resources_;
};

}  // namespace

Result<std::unique_ptr<KmeansEngine>> make_faiss_gpu_kmeans(int gpu) {
  try {
    if (gpu < faiss::gpu::getNumDevices()) {
      std::unique_ptr<KmeansEngine> engine = std::make_unique<FaissGpuKmeans>(gpu);
      return engine;
    }
  } catch (const std::exception& error) {
    return Status(Code::kUnsupported, concat("engine faiss-gpu: ", error.what()));
  }
  return Status(Code::kUnsupported,
                concat("engine faiss-gpu: there is no CUDA device ", gpu, " on this machine"));
}

}  // namespace sqz
