#include "libindex/cuda/kmeans.h"

#include <algorithm>
#include <vector>

#include "libindex/cuda/kmeans/common/assign.h"
#include "libindex/cuda/kmeans/resolve/kernel.h"
#include "libindex/cuda/kmeans/sm80/kernel.h"
#include "libindex/cuda/kmeans/sm90/kernel.h"
#include "libindex/cuda/kmeans/update/kernel.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {
namespace {

// Counters that are zeroed together with the cluster sizes, once an iteration.
constexpr int64_t kEmptyHeads = 0, kDoubtfulCounts = 2, kLargeCounts = 4, kCounters = 64;

constexpr int32_t kPointsToKeep = 40;  // a cluster, from which on sums are kept

Result<Device> current_device() {
  int gpu = 0;
  SQZ_RETURN_IF_CUDA_ERROR(cudaGetDevice(&gpu));
  return read_device(gpu);
}

// The one place where a kernel is chosen: what is required, and what is missing.
Result<AssignKernel> choose_kernel(const KmeansParams& params, const Device& device) {
  const bool hopper = device.has_wgmma() && is_kernel_dim(params.shape.dim);
  if (params.kernel == AssignKernel::kHopper && !hopper) {
    return Status(
        Code::kUnsupported,
        concat("the Hopper kernel needs compute capability 9.0 and d of 64, 96, 128 or "
               "256; here they are ",
               device.capability / 10, ".", device.capability % 10, " and ", params.shape.dim));
  }
  if (params.kernel != AssignKernel::kAuto) return params.kernel;
  return hopper ? AssignKernel::kHopper : AssignKernel::kPlain;
}

Status check_shape(const KmeansShape& shape) {
  const int d = shape.dim;
  auto wrong = [](const char* field, int64_t found, const char* expected) {
    return Status(Code::kInvalidArgument, bad_field("k-means", field, concat(found), expected));
  };
  if (shape.heads < 1 || shape.heads > 65535) return wrong("heads", shape.heads, "1 to 65535");
  if (shape.points < 1 || shape.points > kMaxPoints) {
    return wrong("points", shape.points, "1 to 1073741824");
  }
  if (d != 32 && !is_kernel_dim(d)) return wrong("dim", d, "32, 64, 96, 128 or 256");
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

// The places of a run's arrays, as parameters of its kernels that have nothing else yet.
struct Workspace {
  UpdateParams params = {};
  // Where sums are kept, each second update has these instead of the result's; null elsewhere.
  uint32_t *order = nullptr, *offsets = nullptr;
  size_t bytes = 0;
};

// Keeping sums costs a read and a write of them, and three numbers a point; it saves reading the
// points that stay where they are. With few points a cluster that is no gain.
bool keeps_sums(const KmeansShape& shape) {
  return shape.points / shape.clusters >= kPointsToKeep;
}

Workspace lay_out(const KmeansShape& shape, void* base) {
  const int64_t rows = int64_t{shape.heads} * shape.points;
  const int64_t clusters = int64_t{shape.heads} * shape.clusters;
  Workspace workspace;
  UpdateParams& params = workspace.params;
  Layout layout(base);
  params.inverse_norms = layout.take<float>(rows);
  params.ranks = layout.take<uint32_t>(rows);
  params.doubtful = layout.take<uint2>(rows);
  // The large clusters are listed where the doubtful points were: they are used after each other.
  params.large = reinterpret_cast<uint32_t*>(params.doubtful);
  auto* counters = layout.take<uint32_t>(kCounters + clusters);
  params.empty_heads = counters + kEmptyHeads;
  params.doubtful_counts = counters + kDoubtfulCounts;
  params.large_counts = counters + kLargeCounts;
  params.sizes = counters + kCounters;
  params.seats = layout.take<uint2>(clusters);
  params.donors = layout.take<uint2>(clusters);
  if (keeps_sums(shape)) {
    params.sums = layout.take<int32_t>(clusters * shape.dim);
    params.places = layout.take<uint32_t>(rows);
    workspace.order = layout.take<uint32_t>(rows);
    workspace.offsets = layout.take<uint32_t>(clusters + shape.heads);
  }
  workspace.bytes = layout.used();
  return workspace;
}

// One run's kernels with their parameters filled in.
class Run {
 public:
  // params.shape's heads start with number first_head. `spare` multiprocessors are left to other
  // work by the assign kernel, if it is the Hopper one.
  Run(const KmeansParams& params, int first_head, AssignKernel kernel, const Device& device,
      int spare, cudaStream_t stream)
      : shape_(params.shape),
        workspace_(lay_out(params.shape, params.workspace)),
        params_(workspace_.params),
        kernel_(kernel),
        assign_blocks_(device.multiprocessors - spare),
        stream_(stream),
        order_(params.order),
        offsets_(params.offsets) {
    params_.heads = shape_.heads;
    params_.points_per_head = shape_.points;
    params_.clusters = shape_.clusters;
    params_.dim = shape_.dim;
    params_.first_head = first_head;
    params_.seed = params.seed;
    params_.seeds = params.seeds;
    params_.points = static_cast<const __nv_bfloat16*>(params.points);
    params_.weights = params.weights;
    params_.centroids = static_cast<__nv_bfloat16*>(params.centroids);
    params_.labels = params.labels;
    params_.cosines = params.cosines;
    params_.order = params.order;
    params_.offsets = params.offsets;
    if (params.weights != nullptr) params_.sums = nullptr;
    params_.fault = params.fault;
    params_.multiprocessors = device.multiprocessors;
  }

  Status norms() { return launch_norms(params_, stream_); }

  Status seed() { return launch_seed(params_, stream_); }

  Status assign() {
    SQZ_RETURN_IF_ERROR(clear_counters(0));
    SQZ_RETURN_IF_ERROR(assign_points());
    return launch_resolve(params_, params_.multiprocessors, stream_);
  }

  Status update() {
    SQZ_RETURN_IF_ERROR(launch_group(params_, stream_));
    params_.by_label = params_.order;  // from here on there is one
    SQZ_RETURN_IF_ERROR(launch_centroids(params_, stream_));
    if (params_.sums != nullptr) {  // the next order goes where this one was not
      const bool in_workspace = params_.order == workspace_.order;
      params_.previous_order = params_.order;
      params_.previous_offsets = params_.offsets;
      params_.order = in_workspace ? order_ : workspace_.order;
      params_.offsets = in_workspace ? offsets_ : workspace_.offsets;
    }
    return {};
  }

  // Sorted order, no empty cluster.
  Status finish() {
    params_.sums = nullptr;
    params_.order = order_;
    params_.offsets = offsets_;
    SQZ_RETURN_IF_ERROR(launch_group(params_, stream_));
    SQZ_RETURN_IF_ERROR(launch_sort(params_, stream_));
    SQZ_RETURN_IF_ERROR(launch_move(params_, stream_));
    params_.after_move = true;
    SQZ_RETURN_IF_ERROR(clear_counters(kEmptyHeads + 1));
    SQZ_RETURN_IF_ERROR(launch_count(params_, stream_));
    SQZ_RETURN_IF_ERROR(launch_group(params_, stream_));
    return launch_sort(params_, stream_);
  }

 private:
  // From this counter on, sizes included.
  Status clear_counters(int64_t first) {
    const size_t clusters =
        static_cast<size_t>(shape_.heads) * static_cast<size_t>(shape_.clusters);
    const size_t count = static_cast<size_t>(kCounters - first) + clusters;
    return cuda_status(
        cudaMemsetAsync(params_.sizes - kCounters + first, 0, count * sizeof(uint32_t), stream_),
        "cudaMemsetAsync");
  }

  Status assign_points() {
    if (shape_.dim == 32) return sm80::launch_assign<32>(params_, stream_);
    return for_dim(shape_.dim, no_such_dim(shape_.dim), [&](auto dim) {
      if (kernel_ == AssignKernel::kHopper) {
        return sm90::launch_assign<dim.value>(params_, assign_blocks_, stream_);
      }
      return sm80::launch_assign<dim.value>(params_, stream_);
    });
  }

  KmeansShape shape_;
  Workspace workspace_;
  UpdateParams params_;
  AssignKernel kernel_;
  int assign_blocks_;
  cudaStream_t stream_;
  uint32_t *order_, *offsets_;  // of the result
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

struct Plan {
  AssignKernel kernel;
  Device device;
};

Result<Plan> prepare(const KmeansParams& params, bool whole_run) {
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
  Plan plan;
  SQZ_ASSIGN_OR_RETURN(plan.device, current_device());
  SQZ_ASSIGN_OR_RETURN(plan.kernel, choose_kernel(params, plan.device));
  return plan;
}

Status run_loop(const std::vector<Run*>& runs, int iterations) {
  // Step by step for all runs, so that both streams are fed from the start.
  for (Run* run : runs) SQZ_RETURN_IF_ERROR(run->norms());
  for (Run* run : runs) SQZ_RETURN_IF_ERROR(run->seed());
  for (int i = 0; i < iterations; ++i) {
    for (Run* run : runs) {
      SQZ_RETURN_IF_ERROR(run->assign());
      SQZ_RETURN_IF_ERROR(run->update());
    }
  }
  for (Run* run : runs) {
    SQZ_RETURN_IF_ERROR(run->assign());
    SQZ_RETURN_IF_ERROR(run->finish());
  }
  return {};
}

// Heads [first, first + count) of params as parameters of their own.
KmeansParams slice(const KmeansParams& params, int first, int count, size_t workspace_at) {
  const auto skip = static_cast<size_t>(first);
  const size_t rows = skip * static_cast<size_t>(params.shape.points);
  const size_t clusters = skip * static_cast<size_t>(params.shape.clusters);
  const size_t row_bytes = static_cast<size_t>(params.shape.dim) * 2;
  KmeansParams part = params;
  part.shape.heads = count;
  part.points = static_cast<const char*>(params.points) + rows * row_bytes;
  part.centroids = static_cast<char*>(params.centroids) + clusters * row_bytes;
  part.labels = params.labels + rows;
  part.order = params.order + rows;
  part.offsets = params.offsets + clusters + skip;
  if (params.seeds) part.seeds = params.seeds + skip;
  if (params.weights) part.weights = params.weights + rows;
  if (params.cosines) part.cosines = params.cosines + rows;
  part.workspace = static_cast<char*>(params.workspace) + workspace_at;
  return part;
}

// Multiprocessors to leave to one half's update so that it takes about as long as the other half's
// assignment on the rest: bytes of a point's update at 60 GB/s a multiprocessor, against 2 C d
// operations at 5.3 TFLOP/s (both measured on an H200).
int spare_multiprocessors(const KmeansShape& shape, int multiprocessors) {
  const double update = (2.0 * shape.dim + 16) / 60e9;
  const double assign = 2.0 * shape.clusters * shape.dim / 5.3e12;
  const double spare = multiprocessors * update / (update + assign);
  return std::clamp(static_cast<int>(spare + 0.5), 1, multiprocessors / 4);
}

class Event {
 public:
  Status create() {
    return cuda_status(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming),
                       "cudaEventCreateWithFlags");
  }
  // Work that `waiting` gets from here on starts after what `leading` has got.
  Status order(cudaStream_t leading, cudaStream_t waiting) {
    SQZ_RETURN_IF_CUDA_ERROR(cudaEventRecord(event_, leading));
    return cuda_status(cudaStreamWaitEvent(waiting, event_, 0), "cudaStreamWaitEvent");
  }
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (event_ != nullptr) forget(cudaEventDestroy(event_));
  }

 private:
  cudaEvent_t event_ = nullptr;
};

Status run_halves(const KmeansParams& params, const Plan& plan, cudaStream_t stream) {
  const int half = (params.shape.heads + 1) / 2;
  const int spare = spare_multiprocessors(params.shape, plan.device.multiprocessors);
  const KmeansParams first = slice(params, 0, half, 0);
  const KmeansParams second =
      slice(params, half, params.shape.heads - half, lay_out(first.shape, nullptr).bytes);
  Event begin, end;
  SQZ_RETURN_IF_ERROR(begin.create());
  SQZ_RETURN_IF_ERROR(end.create());
  SQZ_RETURN_IF_ERROR(begin.order(stream, params.second_stream));
  Run run(first, 0, plan.kernel, plan.device, spare, stream);
  Run other(second, half, plan.kernel, plan.device, spare, params.second_stream);
  const Status status = run_loop({&run, &other}, params.iterations);
  SQZ_RETURN_IF_ERROR(end.order(params.second_stream, stream));
  return status;
}

}  // namespace

Result<size_t> kmeans_workspace(const KmeansShape& shape) {
  SQZ_RETURN_IF_ERROR(check_shape(shape));
  KmeansShape half = shape, rest = shape;
  half.heads = (shape.heads + 1) / 2;
  rest.heads = shape.heads - half.heads;
  return std::max(lay_out(shape, nullptr).bytes,
                  lay_out(half, nullptr).bytes + lay_out(rest, nullptr).bytes);
}

Status kmeans_run(const KmeansParams& params, cudaStream_t stream) {
  SQZ_ASSIGN_OR_RETURN(const Plan plan, prepare(params, true));
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(params.fault, 0, sizeof(uint32_t), stream));
  if (params.second_stream != nullptr && params.shape.heads > 1) {
    return run_halves(params, plan, stream);
  }
  Run run(params, 0, plan.kernel, plan.device, 0, stream);
  return run_loop({&run}, params.iterations);
}

Status kmeans_assign(const KmeansParams& params, cudaStream_t stream) {
  SQZ_ASSIGN_OR_RETURN(const Plan plan, prepare(params, false));
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(params.fault, 0, sizeof(uint32_t), stream));
  Run run(params, 0, plan.kernel, plan.device, 0, stream);
  SQZ_RETURN_IF_ERROR(run.norms());
  return run.assign();
}

}  // namespace sqz::cuda
