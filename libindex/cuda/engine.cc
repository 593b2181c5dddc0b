// The engine "cuda": labels alone through run(), whole layers through layer_engine().
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "libindex/cuda/kmeans.h"
#include "libindex/cuda/layer/kernels.h"
#include "libindex/cuda/layer_engine.h"
#include "libindex/kmeans.h"
#include "libruntime/cuda/cuda_status.h"

namespace sqz {
namespace cuda {
namespace {

struct BatchMemory {
  float* staging = nullptr;                                          // [B, N, d] as given
  void* points = nullptr;                                            // [B, N, padded d] bf16
  uint32_t *weights = nullptr, *labels = nullptr, *order = nullptr;  // [B, N]
  uint32_t* offsets = nullptr;                                       // [B, C + 1]
  void* centroids = nullptr;                                         // [B, C, padded d]
  uint64_t *seeds = nullptr, *bad = nullptr;                         // [B], [1]
  uint32_t* fault = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0, used = 0;
};

KmeansShape shape_of(const KmeansProblem& problem, int64_t heads) {
  return {static_cast<int32_t>(heads), static_cast<int32_t>(problem.count),
          static_cast<int32_t>(padded_dim(problem.dim)), static_cast<int32_t>(problem.clusters)};
}

Result<BatchMemory> lay_out(const KmeansProblem& problem, int64_t heads, void* base) {
  const KmeansShape shape = shape_of(problem, heads);
  const int64_t points = heads * problem.count, clusters = heads * problem.clusters;
  BatchMemory memory;
  Layout layout(base);
  memory.staging = layout.take<float>(points * problem.dim);
  memory.points = layout.take<char>(points * shape.dim * 2);
  if (problem.weights != nullptr) memory.weights = layout.take<uint32_t>(points);
  memory.labels = layout.take<uint32_t>(points);
  memory.order = layout.take<uint32_t>(points);
  memory.offsets = layout.take<uint32_t>(clusters + heads);
  memory.centroids = layout.take<char>(clusters * shape.dim * 2);
  memory.seeds = layout.take<uint64_t>(heads);
  memory.bad = layout.take<uint64_t>(1);
  memory.fault = layout.take<uint32_t>(1);
  SQZ_ASSIGN_OR_RETURN(memory.workspace_bytes, kmeans_workspace(shape));
  memory.workspace = layout.take<char>(static_cast<int64_t>(memory.workspace_bytes));
  memory.used = layout.used();
  return memory;
}

bool same_shape(const KmeansProblem& a, const KmeansProblem& b) {
  return a.count == b.count && a.dim == b.dim && a.clusters == b.clusters &&
         a.iterations == b.iterations && (a.weights == nullptr) == (b.weights == nullptr);
}

class CudaKmeans final : public KmeansEngine {
 public:
  CudaKmeans(int gpu, std::string name) : gpu_(gpu), name_(std::move(name)), layers_(gpu) {}

  std::string name() const override { return "cuda (" + name_ + ")"; }
  LayerEngine* layer_engine() override { return &layers_; }

  Status run(std::span<const KmeansProblem> problems, int /*threads*/,
             const std::function<void()>& done) override {
    const CurrentDevice current(gpu_);
    if (stream_.get() == nullptr) SQZ_RETURN_IF_ERROR(stream_.create());
    for (size_t first = 0; first < problems.size();) {
      const KmeansProblem& problem = problems[first];
      SQZ_ASSIGN_OR_RETURN(const int64_t largest, batch_size(problem));
      size_t count = 1;
      while (count < static_cast<size_t>(largest) && first + count < problems.size() &&
             same_shape(problem, problems[first + count])) {
        ++count;
      }
      SQZ_RETURN_IF_ERROR(solve(problems.subspan(first, count)));
      for (size_t i = 0; i < count && done; ++i) done();
      first += count;
    }
    return {};
  }

 private:
  Result<int64_t> batch_size(const KmeansProblem& problem) {
    if (problem.count < 1 || problem.count > std::numeric_limits<int32_t>::max() ||
        problem.clusters < 1 || problem.clusters > problem.count || problem.iterations < 1) {
      return Status(Code::kInternal,
                    concat("k-means of ", problem.count, " points into ", problem.clusters));
    }
    SQZ_ASSIGN_OR_RETURN(const BatchMemory one, lay_out(problem, 1, nullptr));
    SQZ_ASSIGN_OR_RETURN(const size_t available, memory_.available());
    if (one.used > available) {
      return Status(Code::kOutOfMemory,
                    concat("engine cuda needs ", one.used >> 20, " MiB of GPU memory to cluster ",
                           problem.count, " points, ", available >> 20,
                           " are free; free some, or choose --engine faiss"));
    }
    return std::min<int64_t>(static_cast<int64_t>(available / one.used),
                             std::numeric_limits<int32_t>::max() / problem.count);
  }

  Status solve(std::span<const KmeansProblem> problems) {
    const KmeansProblem& first = problems[0];
    const auto heads = static_cast<int64_t>(problems.size());
    SQZ_ASSIGN_OR_RETURN(const BatchMemory sizes, lay_out(first, heads, nullptr));
    SQZ_RETURN_IF_ERROR(memory_.reserve(sizes.used));
    SQZ_ASSIGN_OR_RETURN(const BatchMemory memory, lay_out(first, heads, memory_.data()));
    SQZ_RETURN_IF_ERROR(upload(problems, memory));
    KmeansParams params;
    params.shape = shape_of(first, heads);
    params.iterations = first.iterations;
    params.seeds = memory.seeds;
    params.points = memory.points;
    params.weights = memory.weights;
    params.centroids = memory.centroids;
    params.labels = memory.labels;
    params.order = memory.order;
    params.offsets = memory.offsets;
    params.fault = memory.fault;
    params.workspace = memory.workspace;
    params.workspace_bytes = memory.workspace_bytes;
    SQZ_RETURN_IF_ERROR(kmeans_run(params, stream_.get()));
    for (size_t i = 0; i < problems.size(); ++i) {
      const auto count = static_cast<size_t>(first.count);
      SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(problems[i].assignment, memory.labels + i * count,
                                               count * sizeof(int32_t), cudaMemcpyDeviceToHost,
                                               stream_.get()));
    }
    uint64_t bad = 0;
    uint32_t fault = 0;
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(&bad, memory.bad, sizeof(bad), cudaMemcpyDeviceToHost, stream_.get()));
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(&fault, memory.fault, sizeof(fault),
                                             cudaMemcpyDeviceToHost, stream_.get()));
    SQZ_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_.get()));
    if (bad == std::numeric_limits<uint64_t>::max() && fault == 0) return {};
    return {Code::kNumeric, "engine cuda: a point is not finite, or longer than 1e18"};
  }

  Status upload(std::span<const KmeansProblem> problems, const BatchMemory& memory) {
    const KmeansProblem& first = problems[0];
    const auto count = static_cast<size_t>(first.count);
    const auto floats = static_cast<size_t>(first.count * first.dim);
    std::vector<uint64_t> seeds;
    for (size_t i = 0; i < problems.size(); ++i) {
      seeds.push_back(problems[i].seed);
      SQZ_RETURN_IF_ERROR(copy(problems[i].points, memory.staging + i * floats, floats));
      if (first.weights == nullptr) continue;
      std::vector<uint32_t> weights(count);
      std::transform(problems[i].weights, problems[i].weights + count, weights.begin(),
                     [](float weight) { return static_cast<uint32_t>(std::llround(weight)); });
      SQZ_RETURN_IF_ERROR(copy(weights.data(), memory.weights + i * count, count));
    }
    SQZ_RETURN_IF_ERROR(copy(seeds.data(), memory.seeds, seeds.size()));
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(memory.bad, 0xFF, sizeof(uint64_t), stream_.get()));
    PackParams pack;
    pack.heads = static_cast<int32_t>(problems.size());
    pack.tokens = pack.count = static_cast<int32_t>(first.count);
    pack.dim = static_cast<int32_t>(first.dim);
    pack.head_stride = first.count * first.dim;
    pack.rows = memory.staging;
    pack.out_dim = static_cast<int32_t>(padded_dim(first.dim));
    pack.out = memory.points;
    pack.bad = memory.bad;
    return pack_rows(pack, stream_.get());
  }

  template <class T>
  Status copy(const T* from, T* to, size_t count) {
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, stream_.get()));
    return cuda_status(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
  }

  int gpu_;
  std::string name_;
  CudaLayerEngine layers_;
  Stream stream_;
  DeviceMemory memory_;
};

}  // namespace
}  // namespace cuda

Result<std::unique_ptr<KmeansEngine>> make_cuda_kmeans(int64_t dim, int gpu) {
  const cuda::DeviceProbe probe = cuda::probe_device(gpu);
  const Status usable = cuda::check_probe(probe, gpu);
  if (!usable.ok()) {
    return Status(usable.code(),
                  concat("engine cuda: ", usable.message(), "; choose --engine faiss"));
  }
  if (dim < 1 || dim > 256 || dim % 8 != 0) {
    return Status(Code::kUnsupported,
                  concat("engine cuda: head dimension ", dim,
                         ", expected a multiple of 8 up to 256; choose --engine faiss"));
  }
  std::unique_ptr<KmeansEngine> engine = std::make_unique<cuda::CudaKmeans>(gpu, probe.name);
  return engine;
}

}  // namespace sqz
