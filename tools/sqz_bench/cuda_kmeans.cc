// `kmeans/kernels`: a build's k-means with --device cuda, where the points are in GPU memory.
#include <numeric>
#include <stdexcept>

#include "formats/base/dtype.h"
#include "libindex/cuda/kmeans.h"
#include "tools/sqz_bench/benchmarks.h"

namespace sqz::bench {
namespace {

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

class Kernels {
 public:
  Kernels(const KmeansOptions& options, const Device& gpu) : gpu_(gpu) {
    const size_t rows = static_cast<size_t>(options.heads * options.points);
    const size_t clusters = static_cast<size_t>(options.heads * options.cluster_count());
    const auto dim = static_cast<size_t>(options.dim);
    params_.shape = {static_cast<int32_t>(options.heads), static_cast<int32_t>(options.points),
                     static_cast<int32_t>(options.dim),
                     static_cast<int32_t>(options.cluster_count())};
    params_.iterations = options.iterations;
    params_.seed = options.seed;
    auto workspace = cuda::kmeans_workspace(params_.shape);
    check(workspace.status());
    std::vector<BFloat16> points;
    points.reserve(rows * dim);
    for (int64_t head = 0; head < options.heads; ++head) {
      for (const float x : options.points_of(head)) points.push_back(to_bfloat16(x));
    }
    params_.points = keep(std::as_bytes(std::span(points)));
    params_.centroids = room(clusters * dim * sizeof(BFloat16));
    params_.labels = static_cast<uint32_t*>(room(rows * sizeof(uint32_t)));
    params_.order = static_cast<uint32_t*>(room(rows * sizeof(uint32_t)));
    params_.offsets = static_cast<uint32_t*>(
        room((clusters + static_cast<size_t>(options.heads)) * sizeof(uint32_t)));
    params_.cosines = static_cast<float*>(room(rows * sizeof(float)));
    params_.fault = static_cast<uint32_t*>(room(sizeof(uint32_t)));
    params_.workspace_bytes = *workspace;
    params_.workspace = room(*workspace);
    if (cudaStreamCreate(&params_.second_stream) != cudaSuccess) {
      throw std::runtime_error("cudaStreamCreate");
    }
  }
  ~Kernels() { cudaStreamDestroy(params_.second_stream); }
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  void run() const { check(cuda::kmeans_run(params_, static_cast<cudaStream_t>(gpu_.stream()))); }
  double mean_cosine() const {
    std::vector<float> cosines(static_cast<size_t>(params_.shape.heads) *
                               static_cast<size_t>(params_.shape.points));
    if (cudaMemcpy(cosines.data(), params_.cosines, cosines.size() * sizeof(float),
                   cudaMemcpyDeviceToHost) != cudaSuccess) {
      throw std::runtime_error("cudaMemcpy");
    }
    return std::accumulate(cosines.begin(), cosines.end(), 0.0) /
           static_cast<double>(cosines.size());
  }

 private:
  void* keep(std::span<const std::byte> bytes) {
    memory_.push_back(gpu_.copy(bytes));
    return memory_.back().get();
  }
  void* room(size_t bytes) { return keep(std::vector<std::byte>(bytes)); }

  const Device& gpu_;
  std::vector<std::shared_ptr<void>> memory_;
  cuda::KmeansParams params_;
};

}  // namespace

void add_kmeans_kernels(const KmeansOptions& options, std::shared_ptr<const Device> gpu) {
  const auto body = [=](benchmark::State& state) {
    try {
      const Kernels kernels(options, *gpu);
      gpu->time(
          state, 1, [&](int64_t) { kernels.run(); }, [] {});
      state.counters["flop_per_s"] =
          benchmark::Counter(options.flop(), benchmark::Counter::kIsIterationInvariantRate);
      state.counters["mean_cosine"] = kernels.mean_cosine();
    } catch (const std::exception& error) {
      fail(state, error.what());
    }
  };
  benchmark::RegisterBenchmark("kmeans/kernels", body)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->Iterations(5);
}

}  // namespace sqz::bench
