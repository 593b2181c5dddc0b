// k-means through faiss::Clustering over FAISS's exact flat index on a GPU. Compiled where the
// FAISS that CMake found has GPU support (docs/design.md).
#include <faiss/gpu/GpuIndexFlat.h>
#include <faiss/gpu/StandardGpuResources.h>
#include <faiss/gpu/utils/DeviceUtils.h>

#include <exception>

#include "libindex/faiss_kmeans.h"

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
    faiss::gpu::GpuIndexFlatConfig config;
    config.device = gpu_;
    faiss::gpu::GpuIndexFlatIP index(&resources_, static_cast<int>(problem.dim), config);
    return faiss_lloyd(problem, index);
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
