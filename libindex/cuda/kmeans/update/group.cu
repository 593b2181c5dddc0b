// Points by cluster: a counting sort, and the plan of the refill where clusters are empty.
#include "libindex/cuda/kmeans/common/reduce.cuh"
#include "libindex/cuda/kmeans/update/kernel.h"
#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;
constexpr int kPerThread = 4;

// Each thread takes kPerThread points at once, so that as many atomics or gathers are in flight.
__global__ void __launch_bounds__(kThreads) count_kernel(const UpdateParams params) {
  if (nothing_moved(params)) return;
  const int64_t head_points = static_cast<int64_t>(blockIdx.y) * params.points_per_head;
  uint32_t* sizes = params.sizes + static_cast<int64_t>(blockIdx.y) * params.clusters;
  const int first = blockIdx.x * kPerThread * kThreads + threadIdx.x;
  uint32_t labels[kPerThread], ranks[kPerThread];
#pragma unroll
  for (int u = 0; u < kPerThread; ++u) {
    const int i = first + u * kThreads;
    if (i < params.points_per_head) labels[u] = params.labels[head_points + i];
  }
#pragma unroll
  for (int u = 0; u < kPerThread; ++u) {
    const int i = first + u * kThreads;
    if (i < params.points_per_head) ranks[u] = atomicAdd(&sizes[labels[u]], 1u);
  }
#pragma unroll
  for (int u = 0; u < kPerThread; ++u) {
    const int i = first + u * kThreads;
    if (i < params.points_per_head) params.ranks[head_points + i] = ranks[u];
  }
}

template <bool kKept>
__global__ void __launch_bounds__(kThreads) scatter_kernel(const UpdateParams params) {
  if (nothing_moved(params)) return;
  const int64_t head_points = static_cast<int64_t>(blockIdx.y) * params.points_per_head;
  const uint32_t* offsets =
      params.offsets + static_cast<int64_t>(blockIdx.y) * (params.clusters + 1);
  const int first = blockIdx.x * kPerThread * kThreads + threadIdx.x;
  uint32_t places[kPerThread], entries[kPerThread];
#pragma unroll
  for (int u = 0; u < kPerThread; ++u) {
    const int i = first + u * kThreads;
    if (i >= params.points_per_head) continue;
    const uint32_t label = params.labels[head_points + i];
    places[u] = offsets[label] + params.ranks[head_points + i];
    entries[u] = static_cast<uint32_t>(i);
    if (kKept && params.previous_order != nullptr) {
      const uint32_t* previous = params.previous_offsets + (offsets - params.offsets) + label;
      const uint32_t place = params.places[head_points + i];
      if (place < previous[0] || place >= previous[1]) {
        params.previous_order[head_points + place] = entries[u] | kLeft;
        entries[u] |= kCame;
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kPerThread; ++u) {
    const int i = first + u * kThreads;
    if (i >= params.points_per_head) continue;
    params.order[head_points + places[u]] = entries[u];
    if (kKept) params.places[head_points + i] = places[u];
  }
}

// Splits of a cluster of `size` points such that no part has more than `largest`.
__device__ __forceinline__ uint32_t splits(uint32_t size, uint32_t largest) {
  return size == 0 ? 0 : (size - 1) / largest;
}

// One block a head, a run of clusters a thread.
__global__ void __launch_bounds__(kScanThreads) offsets_kernel(const UpdateParams params) {
  if (nothing_moved(params)) return;
  const int64_t head = blockIdx.x;
  const int clusters = params.clusters;
  const int per_thread = (clusters + kScanThreads - 1) / kScanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * per_thread, clusters);
  const int end = min(begin + per_thread, clusters);
  const uint32_t* sizes = params.sizes + head * clusters;
  uint32_t* offsets = params.offsets + head * (clusters + 1);
  uint2* seats = params.seats + head * clusters;
  uint2* donors = params.donors + head * clusters;

  uint32_t points = 0, empties = 0;
  for (int c = begin; c < end; ++c) {
    points += sizes[c];
    empties += sizes[c] == 0;
  }
  uint32_t before = block_scan_1024(points).before;
  for (int c = begin; c < end; ++c) {
    offsets[c] = before;
    before += sizes[c];
  }
  if (threadIdx.x == 0) offsets[clusters] = static_cast<uint32_t>(params.points_per_head);

  const Scan empty = block_scan_1024(empties);
  if (empty.total == 0) return;
  if (threadIdx.x == 0 && !params.after_move) atomicAdd(params.empty_heads, 1u);
  // D'Hondt: the largest bound of a part at which all clusters together give enough splits. With
  // parts of one point there are always enough, as there are no fewer points than clusters.
  auto total_splits = [&](uint32_t largest) {
    uint32_t mine = 0;
    for (int c = begin; c < end; ++c) mine += splits(sizes[c], largest);
    return block_scan_1024(mine).total;
  };
  uint32_t enough = 1, too_few = static_cast<uint32_t>(params.points_per_head);
  while (too_few - enough > 1) {
    const uint32_t middle = enough + (too_few - enough) / 2;
    (total_splits(middle) >= empty.total ? enough : too_few) = middle;
  }
  // All splits of the next larger bound, and of those that this one adds the first ones.
  uint32_t sure = 0, extra = 0;
  for (int c = begin; c < end; ++c) {
    sure += splits(sizes[c], enough + 1);
    extra += splits(sizes[c], enough) - splits(sizes[c], enough + 1);
  }
  const uint32_t wanted = empty.total - block_scan_1024(sure).total;
  uint32_t extra_before = block_scan_1024(extra).before;
  const uint32_t extra_taken = min(extra_before + extra, max(wanted, extra_before)) - extra_before;
  uint32_t seat = block_scan_1024(sure + extra_taken).before;
  for (int c = begin; c < end; ++c) {
    const uint32_t fixed = splits(sizes[c], enough + 1);
    const uint32_t added = splits(sizes[c], enough) - fixed;
    const uint32_t left = wanted > extra_before ? wanted - extra_before : 0;
    const uint32_t count = fixed + min(added, left);
    extra_before += added;
    for (uint32_t split = 0; split < count; ++split) {
      seats[seat++] = make_uint2(static_cast<uint32_t>(c), split);
    }
  }
  __syncthreads();
  uint32_t empties_before = empty.before;
  for (int c = begin; c < end; ++c) {
    if (sizes[c] == 0) donors[c] = seats[empties_before++];
  }
}

__global__ void __launch_bounds__(kThreads) move_kernel(const UpdateParams params) {
  const int64_t cluster = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (cluster >= static_cast<int64_t>(params.heads) * params.clusters) return;
  if (params.sizes[cluster] != 0) return;
  const int64_t head = cluster / params.clusters;
  const uint2 donor = params.donors[cluster];
  const uint32_t place = params.offsets[head * (params.clusters + 1) + donor.x + 1] - 1 - donor.y;
  const int64_t head_points = head * params.points_per_head;
  params.labels[head_points + params.order[head_points + place]] =
      static_cast<uint32_t>(cluster % params.clusters);
}

dim3 points_grid(const UpdateParams& params) {
  const int blocks = (params.points_per_head + kPerThread * kThreads - 1) / (kPerThread * kThreads);
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(params.heads));
}

}  // namespace

Status launch_count(const UpdateParams& params, cudaStream_t stream) {
  count_kernel<<<points_grid(params), kThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "count kernel");
}

Status launch_group(const UpdateParams& params, cudaStream_t stream) {
  offsets_kernel<<<params.heads, kScanThreads, 0, stream>>>(params);
  if (params.sums != nullptr) {
    scatter_kernel<true><<<points_grid(params), kThreads, 0, stream>>>(params);
  } else {
    scatter_kernel<false><<<points_grid(params), kThreads, 0, stream>>>(params);
  }
  return cuda_status(cudaGetLastError(), "grouping kernels");
}

Status launch_move(const UpdateParams& params, cudaStream_t stream) {
  const int64_t clusters = int64_t{params.heads} * params.clusters;
  move_kernel<<<static_cast<unsigned>((clusters + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      params);
  return cuda_status(cudaGetLastError(), "move kernel");
}

}  // namespace sqz::cuda
