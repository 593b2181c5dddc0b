// `kmeans/kernels`: the kernels of the engine `cuda` (libindex/cuda/kmeans.h), with points in GPU
// memory. Points are N(0, 1): without clusters of their own, the hardest case.
#include <cmath>
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

int64_t cluster_count(const KmeansOptions& o) {
  return std::max<int64_t>(1, std::llround(o.clusters * static_cast<double>(o.points)));
}

// bfloat16 numbers. Of more than 8 heads some have the same points; clusters differ all the same.
std::vector<BFloat16> points_of(const KmeansOptions& o) {
  std::vector<BFloat16> out;
  out.reserve(static_cast<size_t>(o.heads * o.points * o.dim));
  for (int64_t head = 0; head < o.heads; ++head) {
    Random random(o.seed * 7919 + static_cast<uint64_t>(head % 8) + 1);
    for (int64_t i = 0; i < o.points * o.dim; ++i) out.push_back(to_bfloat16(normal(random)));
  }
  return out;
}

class Kernels {
 public:
  Kernels(const KmeansOptions& options, const Device& gpu) : gpu_(gpu) {
    const size_t rows = static_cast<size_t>(options.heads * options.points);
    const size_t clusters = static_cast<size_t>(options.heads * cluster_count(options));
    const auto dim = static_cast<size_t>(options.dim);
    params_.shape = {static_cast<int32_t>(options.heads), static_cast<int32_t>(options.points),
                     static_cast<int32_t>(options.dim),
                     static_cast<int32_t>(cluster_count(options))};
    params_.iterations = options.iterations;
    params_.seed = options.seed;
    auto workspace = cuda::kmeans_workspace(params_.shape);
    check(workspace.status());
    const std::vector<BFloat16> points = points_of(options);
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

void add_kmeans(const KmeansOptions& options, std::shared_ptr<const Device> gpu) {
  const double flop = 2.0 * (options.iterations + 1) *
                      static_cast<double>(options.heads * options.points) *
                      static_cast<double>(cluster_count(options) * options.dim);
  const auto body = [=](benchmark::State& state) {
    try {
      const Kernels kernels(options, *gpu);
      gpu->time(
          state, 1, [&](int64_t) { kernels.run(); }, [] {});
      state.counters["flop_per_s"] =
          benchmark::Counter(flop, benchmark::Counter::kIsIterationInvariantRate);
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
