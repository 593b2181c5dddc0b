// New centroids: sums over each cluster's points, and refills of empty clusters.
#include "libindex/cuda/kmeans/update/hash.cuh"
#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLargeThreads = 512;
constexpr uint32_t kLarge = 512;  // points from which on a whole block sums a cluster
constexpr int kUnroll = 8;        // rows in flight, times those that a warp reads at once
constexpr uint32_t kRoom = 256;   // changes of a cluster that are listed

// Adds the points of entries[begin .. end) that are this warp's: groups of 32 from the
// first_group-th on, every groups-th; of a list of changes, takes away those that have left. A lane
// fetches one point's number and norm, all lanes its row.
template <class Sum, bool kWeighted, bool kChanges = false>
__device__ __forceinline__ void add_points(VectorSum<Sum>& sum, const UpdateParams& params,
                                           int64_t head, const uint32_t* entries, uint32_t begin,
                                           uint32_t end, uint32_t first_group, uint32_t groups,
                                           const RowLanes& lanes) {
  const int64_t head_points = head * params.points_per_head;
  const auto* rows = reinterpret_cast<const uint4*>(params.points) + head_points * lanes.lanes;
  for (uint32_t i = begin + 32 * first_group; i < end; i += 32 * groups) {
    const uint32_t count = min(32u, end - i);
    uint32_t point = 0, weight = 1;
    float inverse_norm = 0;
    if ((threadIdx.x & 31) < count) {
      const uint32_t entry = entries[i + (threadIdx.x & 31)];
      point = entry & kPointBits;
      inverse_norm = params.inverse_norms[head_points + point];
      if (kChanges && (entry & kLeft)) inverse_norm = -inverse_norm;
      if (kWeighted) weight = params.weights[head_points + point];
    }
    for (uint32_t j = 0; j < count; j += kUnroll * lanes.rows) {
      uint4 raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {  // rows past the last repeat point 0 with norm 0
        const uint32_t from = (j + u * lanes.rows + lanes.row) & 31;
        raw[u] = __ldg(rows + static_cast<int64_t>(__shfl_sync(~0u, point, from)) * lanes.lanes +
                       lanes.column);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint32_t from = j + u * lanes.rows + lanes.row;
        const float norm = __shfl_sync(~0u, inverse_norm, from & 31);
        const uint32_t factor = kWeighted ? __shfl_sync(~0u, weight, from & 31) : 1;
        sum.add(raw[u], lanes.row < lanes.rows && from < 32 ? norm : 0.0f, factor);
      }
    }
  }
}

// The empty cluster's new centroid: the donor's member whose hash is least, a different hash for
// each split.
__device__ void refill(const UpdateParams& params, int64_t head, int64_t cluster,
                       const RowLanes& lanes) {
  const uint2 donor = params.donors[cluster];
  const uint32_t* offsets = params.offsets + head * (params.clusters + 1);
  const int64_t head_points = head * params.points_per_head;
  uint64_t least = ~uint64_t{0};
  for (uint32_t i = offsets[donor.x] + (threadIdx.x & 31); i < offsets[donor.x + 1]; i += 32) {
    const uint32_t point = params.order[head_points + i] & kPointBits;
    const uint64_t hash = mix((static_cast<uint64_t>(donor.y) << 32) | point);
    least = min(least, (hash & 0xFFFFFFFF00000000u) | point);
  }
  least = warp_minimum(least);
  store_unit_point(params, cluster, head_points + static_cast<uint32_t>(least), lanes);
}

// Lists the entries of order[begin .. end) with `mark` behind `count` others. As many as there is
// room for are written, all are counted.
__device__ __forceinline__ uint32_t list_changes(const uint32_t* order, uint32_t begin,
                                                 uint32_t end, uint32_t mark, uint32_t* list,
                                                 uint32_t count) {
  const uint32_t lane = threadIdx.x & 31;
  for (uint32_t i = begin; i < end; i += 32) {
    const uint32_t entry = i + lane < end ? order[i + lane] : 0;
    const bool changed = entry & mark;
    const unsigned lanes = __ballot_sync(~0u, changed);
    const uint32_t at = count + __popc(lanes & ((1u << lane) - 1));
    if (changed && at < kRoom) list[at] = (entry & kPointBits) | mark;
    count += __popc(lanes);
  }
  return count;
}

// The sum of a cluster of at most kLarge points from that of the last update, if that is less work
// than a new one. False, and nothing done, if not.
__device__ __forceinline__ bool add_changes(VectorSum<int32_t>& sum, const UpdateParams& params,
                                            int64_t head, int64_t cluster, uint32_t begin,
                                            uint32_t end, uint32_t* list, const RowLanes& lanes) {
  const uint32_t* previous =
      params.previous_offsets + head * (params.clusters + 1) + (cluster - head * params.clusters);
  if (previous[1] - previous[0] > kLarge) return false;  // its sum was not kept
  const int64_t head_points = head * params.points_per_head;
  uint32_t count = list_changes(params.order + head_points, begin, end, kCame, list, 0);
  count = list_changes(params.previous_order + head_points, previous[0], previous[1], kLeft, list,
                       count);
  if (count > kRoom || count >= end - begin) return false;
  __syncwarp();
  add_points<int32_t, false, true>(sum, params, head, list, 0, count, 0, 1, lanes);
  return true;
}

// Keeps a folded sum; `changes`: it is what has changed since the last update, and becomes whole.
__device__ __forceinline__ void keep_sum(VectorSum<int32_t>& sum, const UpdateParams& params,
                                         int64_t cluster, bool changes, const RowLanes& lanes) {
  if (lanes.row != 0) return;
  auto* kept = reinterpret_cast<int4*>(params.sums + cluster * params.dim + 8 * lanes.column);
  if (changes) {
    const int4 low = kept[0], high = kept[1];
    const int32_t before[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) sum.part[e] += before[e];
  }
  kept[0] = make_int4(sum.part[0], sum.part[1], sum.part[2], sum.part[3]);
  kept[1] = make_int4(sum.part[4], sum.part[5], sum.part[6], sum.part[7]);
}

template <class Sum, bool kWeighted, bool kKept>
__global__ void __launch_bounds__(kThreads) centroids_kernel(const UpdateParams params) {
  __shared__ uint32_t lists[kKept ? kWarps : 1][kRoom];
  const int64_t cluster = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (cluster >= static_cast<int64_t>(params.heads) * params.clusters) return;
  const int64_t head = cluster / params.clusters;
  const int64_t c = cluster % params.clusters;
  const uint32_t* offsets = params.offsets + head * (params.clusters + 1) + c;
  const uint32_t begin = offsets[0], end = offsets[1];
  const RowLanes lanes(params.dim);
  if (begin == end) return refill(params, head, cluster, lanes);
  if (end - begin > kLarge) {
    if ((threadIdx.x & 31) == 0) {
      params.large[atomicAdd(&params.large_counts[0], 1u)] = static_cast<uint32_t>(cluster);
    }
    return;
  }
  const uint32_t* order = params.order + head * params.points_per_head;
  VectorSum<Sum> sum;
  bool changes = false;
  if constexpr (kKept) {
    changes = params.previous_order != nullptr &&
              add_changes(sum, params, head, cluster, begin, end, lists[threadIdx.x / 32], lanes);
  }
  if (!changes) add_points<Sum, kWeighted>(sum, params, head, order, begin, end, 0, 1, lanes);
  sum.fold(lanes);
  if constexpr (kKept) keep_sum(sum, params, cluster, changes, lanes);
  store_direction(params.centroids + cluster * params.dim, lanes, sum);
}

template <bool kWeighted>
__global__ void __launch_bounds__(kLargeThreads) large_centroids_kernel(const UpdateParams params) {
  __shared__ int64_t parts[kLargeThreads / 32][8][32];
  const RowLanes lanes(params.dim);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t count = params.large_counts[0];
  for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t cluster = params.large[i];
    const int64_t head = cluster / params.clusters;
    const uint32_t* offsets =
        params.offsets + head * (params.clusters + 1) + cluster % params.clusters;
    VectorSum<int64_t> sum;
    add_points<int64_t, kWeighted>(sum, params, head, params.order + head * params.points_per_head,
                                   offsets[0], offsets[1], warp, kLargeThreads / 32, lanes);
    sum.fold(lanes);
    for (int e = 0; e < 8; ++e) parts[warp][e][lane] = sum.part[e];
    __syncthreads();
    if (warp == 0) {
      for (int e = 0; e < 8; ++e) {
        for (int w = 1; w < kLargeThreads / 32; ++w) sum.part[e] += parts[w][e][lane];
      }
      store_direction(params.centroids + cluster * params.dim, lanes, sum);
    }
    __syncthreads();
  }
}

template <class Sum, bool kWeighted, bool kKept>
Status launch(const UpdateParams& params, cudaStream_t stream) {
  const int64_t clusters = int64_t{params.heads} * params.clusters;
  const auto blocks = static_cast<unsigned>((clusters + kWarps - 1) / kWarps);
  centroids_kernel<Sum, kWeighted, kKept><<<blocks, kThreads, 0, stream>>>(params);
  large_centroids_kernel<kWeighted><<<params.multiprocessors, kLargeThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "centroid kernels");
}

}  // namespace

Status launch_centroids(const UpdateParams& params, cudaStream_t stream) {
  if (params.weights != nullptr) return launch<int64_t, true, false>(params, stream);
  return params.sums != nullptr ? launch<int32_t, false, true>(params, stream)
                                : launch<int32_t, false, false>(params, stream);
}

}  // namespace sqz::cuda
