#include "libindex/cuda/kmeans.h"

#include "libindex/cuda/cuda_status.h"
#include "libindex/cuda/kmeans/common/assign.h"
#include "libindex/cuda/kmeans/resolve/kernel.h"
#include "libindex/cuda/kmeans/sm80/kernel.h"
#include "libindex/cuda/kmeans/sm90/kernel.h"
#include "libindex/cuda/kmeans/update/kernel.h"

namespace sqz::cuda {
namespace {

// Counters that are zeroed together with the cluster sizes, once an iteration.
constexpr int64_t kDoubtfulCounts = 0, kLargeCounts = 2, kCounters = 64;

struct Device {
  int multiprocessors = 0, major = 0, minor = 0;
};

Result<Device> current_device() {
  int id = 0;
  Device device;
  SQZ_RETURN_IF_CUDA_ERROR(cudaGetDevice(&id));
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id));
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, id));
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&device.minor, cudaDevAttrComputeCapabilityMinor, id));
  return device;
}

bool hopper_dim(int dim) { return dim == 64 || dim == 96 || dim == 128 || dim == 256; }

// The one place where a kernel is chosen: what is required, and what is missing.
Result<AssignKernel> choose_kernel(const KmeansParams& params, const Device& device) {
  const bool hopper = device.major == 9 && device.minor == 0 && hopper_dim(params.shape.dim);
  if (device.major < 8) {
    return Status(Code::kUnsupported,
                  concat("k-means needs a GPU of compute capability 8.0 or newer, this one has ",
                         device.major, ".", device.minor));
  }
  if (params.kernel == AssignKernel::kHopper && !hopper) {
    return Status(Code::kUnsupported,
                  concat("the Hopper kernel needs compute capability 9.0 and d of 64, 96, 128 or "
                         "256; here they are ",
                         device.major, ".", device.minor, " and ", params.shape.dim));
  }
  if (params.kernel != AssignKernel::kAuto) return params.kernel;
  return hopper ? AssignKernel::kHopper : AssignKernel::kPlain;
}

Status check_shape(const KmeansShape& shape) {
  const int d = shape.dim;
  auto wrong = [](const char* field, int64_t found, const char* expected) {
    return Status(Code::kInvalidArgument,
                  bad_field("k-means", field, concat(found), expected));
  };
  if (shape.heads < 1 || shape.heads > 65535) return wrong("heads", shape.heads, "1 to 65535");
  if (shape.points < 1) return wrong("points", shape.points, "at least 1");
  if (d != 32 && !hopper_dim(d)) return wrong("dim", d, "32, 64, 96, 128 or 256");
  if (shape.clusters < 1 || shape.clusters > kMaxClusters) {
    return wrong("clusters", shape.clusters, "1 to 131072");
  }
  if (shape.clusters > shape.points) {
    return wrong("clusters", shape.clusters, "no more than there are points");
  }
  const int64_t rows = int64_t{shape.heads} * shape.points;
  if (rows > INT32_MAX) return wrong("heads x points", rows, "at most 2147483647");
  return {};
}

struct Workspace {
  float* inverse_norms;
  uint2* doubtful;
  uint32_t* counters;  // kCounters, then the sizes
  uint2* seats;
  uint2* donors;
  size_t bytes;
};

Workspace lay_out(const KmeansShape& shape, void* base) {
  const size_t rows = static_cast<size_t>(shape.heads) * static_cast<size_t>(shape.points);
  const size_t clusters = static_cast<size_t>(shape.heads) * static_cast<size_t>(shape.clusters);
  auto* bytes = static_cast<char*>(base);
  size_t used = 0;
  auto take = [&](size_t size) {
    char* part = bytes + used;
    used += (size + 255) / 256 * 256;
    return static_cast<void*>(part);
  };
  Workspace workspace;
  workspace.inverse_norms = static_cast<float*>(take(rows * sizeof(float)));
  workspace.doubtful = static_cast<uint2*>(take(rows * sizeof(uint2)));
  workspace.counters = static_cast<uint32_t*>(take((kCounters + clusters) * sizeof(uint32_t)));
  workspace.seats = static_cast<uint2*>(take(clusters * sizeof(uint2)));
  workspace.donors = static_cast<uint2*>(take(clusters * sizeof(uint2)));
  workspace.bytes = used;
  return workspace;
}

// One run's kernels with their parameters filled in.
class Run {
 public:
  Run(const KmeansParams& params, AssignKernel kernel, const Device& device, cudaStream_t stream)
      : shape_(params.shape),
        workspace_(lay_out(params.shape, params.workspace)),
        kernel_(kernel),
        multiprocessors_(device.multiprocessors),
        stream_(stream) {
    const auto* points = static_cast<const __nv_bfloat16*>(params.points);
    auto* centroids = static_cast<__nv_bfloat16*>(params.centroids);
    const size_t rows = static_cast<size_t>(shape_.heads) * static_cast<size_t>(shape_.points);
    // ranks and large lie where the doubtful points were: they are used after each other.
    auto* scratch = reinterpret_cast<uint32_t*>(workspace_.doubtful);
    update_ = {shape_.heads,      shape_.points,      shape_.clusters,
               shape_.dim,        params.seed,        points,
               params.weights,    centroids,          params.labels,
               params.order,      params.offsets,     workspace_.inverse_norms,
               scratch,           workspace_.counters + kCounters,
               workspace_.seats,  workspace_.donors,  scratch + rows,
               workspace_.counters + kLargeCounts,    params.fault,
               multiprocessors_};
    assign_ = {points,
               centroids,
               workspace_.inverse_norms,
               params.labels,
               params.cosines,
               workspace_.doubtful,
               workspace_.counters + kDoubtfulCounts,
               shape_.heads,
               shape_.points,
               shape_.clusters,
               shape_.dim};
  }

  Status norms() {
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(update_.fault, 0, sizeof(uint32_t), stream_));
    return launch_norms(update_, stream_);
  }

  Status seed() { return launch_seed(update_, stream_); }

  Status assign() {
    SQZ_RETURN_IF_ERROR(clear_counters());
    SQZ_RETURN_IF_ERROR(kernel_ == AssignKernel::kHopper ? assign_hopper() : assign_plain());
    return launch_resolve(assign_, multiprocessors_, stream_);
  }

  Status update() {
    SQZ_RETURN_IF_ERROR(launch_group(update_, stream_));
    return launch_centroids(update_, stream_);
  }

  // Sorted order, no empty cluster.
  Status finish() {
    SQZ_RETURN_IF_ERROR(launch_group(update_, stream_));
    SQZ_RETURN_IF_ERROR(launch_sort(update_, stream_));
    SQZ_RETURN_IF_ERROR(launch_move(update_, stream_));
    SQZ_RETURN_IF_ERROR(clear_counters());
    SQZ_RETURN_IF_ERROR(launch_group(update_, stream_));
    return launch_sort(update_, stream_);
  }

 private:
  Status clear_counters() {
    const size_t clusters =
        static_cast<size_t>(shape_.heads) * static_cast<size_t>(shape_.clusters);
    return cuda_status(cudaMemsetAsync(workspace_.counters, 0,
                                       (kCounters + clusters) * sizeof(uint32_t), stream_),
                       "clearing counters");
  }

  Status assign_hopper() {
    switch (shape_.dim) {
      case 64: return sm90::launch_assign<64>(assign_, multiprocessors_, stream_);
      case 96: return sm90::launch_assign<96>(assign_, multiprocessors_, stream_);
      case 128: return sm90::launch_assign<128>(assign_, multiprocessors_, stream_);
      default: return sm90::launch_assign<256>(assign_, multiprocessors_, stream_);
    }
  }

  Status assign_plain() {
    switch (shape_.dim) {
      case 32: return sm80::launch_assign<32>(assign_, stream_);
      case 64: return sm80::launch_assign<64>(assign_, stream_);
      case 96: return sm80::launch_assign<96>(assign_, stream_);
      case 128: return sm80::launch_assign<128>(assign_, stream_);
      default: return sm80::launch_assign<256>(assign_, stream_);
    }
  }

  KmeansShape shape_;
  Workspace workspace_;
  AssignKernel kernel_;
  int multiprocessors_;
  cudaStream_t stream_;
  UpdateParams update_;
  AssignParams assign_;
};

Status check_pointers(const KmeansParams& params, bool whole_run) {
  if (!params.points || !params.centroids || !params.labels || !params.fault ||
      (whole_run && (!params.order || !params.offsets))) {
    return {Code::kInvalidArgument, "k-means: a required device pointer is null"};
  }
  if (reinterpret_cast<uintptr_t>(params.points) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(params.centroids) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(params.workspace) % 256 != 0) {
    return {Code::kInvalidArgument,
            "k-means: points and centroids must be aligned to 16 bytes, the workspace to 256"};
  }
  return {};
}

Result<Run> prepare(const KmeansParams& params, bool whole_run, cudaStream_t stream) {
  SQZ_ASSIGN_OR_RETURN(const size_t needed, kmeans_workspace(params.shape));
  SQZ_RETURN_IF_ERROR(check_pointers(params, whole_run));
  if (params.workspace == nullptr || params.workspace_bytes < needed) {
    return Status(Code::kInvalidArgument,
                  bad_field("k-means", "workspace_bytes", concat(params.workspace_bytes),
                            concat("at least ", needed)));
  }
  if (params.iterations < 0) {
    return Status(Code::kInvalidArgument,
                  bad_field("k-means", "iterations", concat(params.iterations), "0 or more"));
  }
  SQZ_ASSIGN_OR_RETURN(const Device device, current_device());
  SQZ_ASSIGN_OR_RETURN(const AssignKernel kernel, choose_kernel(params, device));
  return Run(params, kernel, device, stream);
}

}  // namespace

Result<size_t> kmeans_workspace(const KmeansShape& shape) {
  SQZ_RETURN_IF_ERROR(check_shape(shape));
  return lay_out(shape, nullptr).bytes;
}

Status kmeans_run(const KmeansParams& params, cudaStream_t stream) {
  SQZ_ASSIGN_OR_RETURN(Run run, prepare(params, true, stream));
  SQZ_RETURN_IF_ERROR(run.norms());
  SQZ_RETURN_IF_ERROR(run.seed());
  for (int32_t i = 0; i < params.iterations; ++i) {
    SQZ_RETURN_IF_ERROR(run.assign());
    SQZ_RETURN_IF_ERROR(run.update());
  }
  SQZ_RETURN_IF_ERROR(run.assign());
  return run.finish();
}

Status kmeans_assign(const KmeansParams& params, cudaStream_t stream) {
  SQZ_ASSIGN_OR_RETURN(Run run, prepare(params, false, stream));
  SQZ_RETURN_IF_ERROR(run.norms());
  return run.assign();
}

}  // namespace sqz::cuda
