// Sorts the points of each cluster, so that the final order depends on nothing.
#include "libindex/cuda/kmeans/common/reduce.cuh"
#include "libindex/cuda/kmeans/update/kernel.h"
#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLargeThreads = 1024;
constexpr uint32_t kWarpSort = 256;     // points that a warp sorts
constexpr uint32_t kSharedSort = 4096;  // points that a block sorts in shared memory

// Bitonic sort of up to 32 kLaneValues numbers by a warp; lane l holds those at l kLaneValues on.
template <uint32_t kLaneValues>
__device__ void sort_in_warp(uint32_t* run, uint32_t size) {
  const uint32_t first = (threadIdx.x & 31) * kLaneValues;
  uint32_t values[kLaneValues];
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) {
    // In which order the numbers are read does not matter: adjacent lanes read adjacent ones.
    const uint32_t place = i * 32 + (threadIdx.x & 31);
    values[i] = place < size ? run[place] : 0xFFFFFFFFu;
  }
#pragma unroll
  for (uint32_t length = 2; length <= 32 * kLaneValues; length *= 2) {
#pragma unroll
    for (uint32_t distance = length / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (uint32_t i = 0; i < kLaneValues; ++i) {
        const bool ascending = ((first + i) & length) == 0;
        if (distance >= kLaneValues) {
          const uint32_t other = __shfl_xor_sync(~0u, values[i], distance / kLaneValues);
          const bool smaller = (((first + i) & distance) == 0) == ascending;
          values[i] = smaller ? min(values[i], other) : max(values[i], other);
        } else if ((i & distance) == 0) {
          const uint32_t a = values[i], b = values[i + distance];
          values[i] = ascending ? min(a, b) : max(a, b);
          values[i + distance] = ascending ? max(a, b) : min(a, b);
        }
      }
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) {
    if (first + i < size) run[first + i] = values[i];
  }
}

__global__ void __launch_bounds__(kThreads) sort_kernel(const UpdateParams params) {
  if (nothing_moved(params)) return;
  const int64_t cluster = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (cluster >= static_cast<int64_t>(params.heads) * params.clusters) return;
  const int64_t head = cluster / params.clusters;
  const uint32_t* offsets =
      params.offsets + head * (params.clusters + 1) + cluster % params.clusters;
  const uint32_t begin = offsets[0], size = offsets[1] - begin;
  uint32_t* run = params.order + head * params.points_per_head + begin;
  if (size <= 32) {
    sort_in_warp<1>(run, size);
  } else if (size <= 64) {
    sort_in_warp<2>(run, size);
  } else if (size <= 128) {
    sort_in_warp<4>(run, size);
  } else if (size <= kWarpSort) {
    sort_in_warp<8>(run, size);
  } else if ((threadIdx.x & 31) == 0) {
    params.large[atomicAdd(&params.large_counts[1], 1u)] = static_cast<uint32_t>(cluster);
  }
}

__device__ void sort_in_shared(uint32_t* run, uint32_t size, uint32_t* values) {
  uint32_t padded = 64;
  while (padded < size) padded *= 2;
  for (uint32_t i = threadIdx.x; i < padded; i += kLargeThreads) {
    values[i] = i < size ? run[i] : 0xFFFFFFFFu;
  }
  for (uint32_t length = 2; length <= padded; length *= 2) {
    for (uint32_t distance = length / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (uint32_t pair = threadIdx.x; pair < padded / 2; pair += kLargeThreads) {
        const uint32_t low = 2 * pair - (pair & (distance - 1)), high = low + distance;
        const uint32_t a = values[low], b = values[high];
        if ((a > b) == ((low & length) == 0)) {
          values[low] = b;
          values[high] = a;
        }
      }
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < size; i += kLargeThreads) run[i] = values[i];
}

// Clusters of more than kWarpSort points, a block each. One too large for shared memory is read off
// the labels, which are in order already; there are few of those.
__global__ void __launch_bounds__(kLargeThreads) large_sort_kernel(const UpdateParams params) {
  __shared__ uint32_t values[kSharedSort];
  const uint32_t count = params.large_counts[1];
  for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t cluster = params.large[i];
    const int64_t head = cluster / params.clusters;
    const uint32_t c = static_cast<uint32_t>(cluster % params.clusters);
    const uint32_t* offsets = params.offsets + head * (params.clusters + 1) + c;
    const int64_t head_points = head * params.points_per_head;
    uint32_t* run = params.order + head_points + offsets[0];
    const uint32_t size = offsets[1] - offsets[0];
    if (size <= kSharedSort) {
      sort_in_shared(run, size, values);
    } else {
      uint32_t found = 0;
      for (int first = 0; first < params.points_per_head; first += kLargeThreads) {
        const int point = first + static_cast<int>(threadIdx.x);
        const bool member =
            point < params.points_per_head && params.labels[head_points + point] == c;
        const Scan scan = block_scan_1024(member);
        if (member) run[found + scan.before] = static_cast<uint32_t>(point);
        found += scan.total;
      }
    }
    __syncthreads();
  }
}

}  // namespace

Status launch_sort(const UpdateParams& params, cudaStream_t stream) {
  const int64_t clusters = int64_t{params.heads} * params.clusters;
  sort_kernel<<<static_cast<unsigned>((clusters + kWarps - 1) / kWarps), kThreads, 0, stream>>>(
      params);
  large_sort_kernel<<<2 * params.multiprocessors, kLargeThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "sort kernels");
}

}  // namespace sqz::cuda
