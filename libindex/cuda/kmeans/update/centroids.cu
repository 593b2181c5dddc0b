// New centroids: sums over each cluster's points, and refills of empty clusters.
#include "libruntime/cuda/cuda_status.h"
#include "libindex/cuda/kmeans/update/hash.cuh"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLargeThreads = 512;
constexpr uint32_t kLarge = 512;  // points from which on a whole block sums a cluster
constexpr int kUnroll = 8;        // rows in flight, times those that a warp reads at once

// Adds the points order[begin .. end) that are this warp's: groups of 32 from the first_group-th
// on, every groups-th. A lane fetches one point's number and norm, all lanes its row.
template <class Sum, bool kWeighted>
__device__ __forceinline__ void add_points(VectorSum<Sum>& sum, const UpdateParams& params,
                                           int64_t head, uint32_t begin, uint32_t end,
                                           uint32_t first_group, uint32_t groups,
                                           const RowLanes& lanes) {
  const int64_t head_points = head * params.points_per_head;
  const auto* rows = reinterpret_cast<const uint4*>(params.points) + head_points * lanes.lanes;
  for (uint32_t i = begin + 32 * first_group; i < end; i += 32 * groups) {
    const uint32_t count = min(32u, end - i);
    uint32_t point = 0, weight = 1;
    float inverse_norm = 0;
    if ((threadIdx.x & 31) < count) {
      point = params.order[head_points + i + (threadIdx.x & 31)];
      inverse_norm = params.inverse_norms[head_points + point];
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
    const uint32_t point = params.order[head_points + i];
    const uint64_t hash = mix((static_cast<uint64_t>(donor.y) << 32) | point);
    least = min(least, (hash & 0xFFFFFFFF00000000u) | point);
  }
  least = warp_minimum(least);
  store_unit_point(params, cluster, head_points + static_cast<uint32_t>(least), lanes);
}

template <class Sum, bool kWeighted>
__global__ void __launch_bounds__(kThreads) centroids_kernel(const UpdateParams params) {
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
  VectorSum<Sum> sum;
  add_points<Sum, kWeighted>(sum, params, head, begin, end, 0, 1, lanes);
  sum.fold(lanes);
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
    add_points<int64_t, kWeighted>(sum, params, head, offsets[0], offsets[1], warp,
                                   kLargeThreads / 32, lanes);
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

template <class Sum, bool kWeighted>
Status launch(const UpdateParams& params, cudaStream_t stream) {
  const int64_t clusters = int64_t{params.heads} * params.clusters;
  const auto blocks = static_cast<unsigned>((clusters + kWarps - 1) / kWarps);
  centroids_kernel<Sum, kWeighted><<<blocks, kThreads, 0, stream>>>(params);
  SQZ_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  large_centroids_kernel<kWeighted><<<params.multiprocessors, kLargeThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "centroid kernels");
}

}  // namespace

Status launch_centroids(const UpdateParams& params, cudaStream_t stream) {
  return params.weights ? launch<int64_t, true>(params, stream)
                        : launch<int32_t, false>(params, stream);
}

}  // namespace sqz::cuda
