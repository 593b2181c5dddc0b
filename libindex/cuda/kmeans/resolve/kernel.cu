#include "libindex/cuda/kmeans/common/reduce.cuh"
#include "libindex/cuda/kmeans/common/rows.cuh"
#include "libindex/cuda/kmeans/resolve/kernel.h"
#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

constexpr int kPairThreads = 256;
constexpr int kSearchThreads = 512;
constexpr int kUnroll = 4;  // centroids in flight, times those that a warp reads at once

__device__ double dot(const __nv_bfloat16* a, const __nv_bfloat16* b, int dim) {
  double sum = 0;
  for (int k = threadIdx.x & 31; k < dim; k += 32) {
    sum = fma(static_cast<double>(__bfloat162float(a[k])),
              static_cast<double>(__bfloat162float(b[k])), sum);
  }
  return warp_sum(sum);
}

__device__ void write_label(const AssignParams& params, int64_t head, uint32_t index,
                            uint32_t label) {
  params.labels[index] = label;
  params.ranks[index] = atomicAdd(&params.sizes[head * params.clusters + label], 1u);
}

// A warp for each point with two candidates.
__global__ void __launch_bounds__(kPairThreads) pairs_kernel(const AssignParams params) {
  const uint32_t count = params.doubtful_counts[0];
  const uint32_t warps = gridDim.x * (kPairThreads / 32);
  for (uint32_t i = blockIdx.x * (kPairThreads / 32) + threadIdx.x / 32; i < count; i += warps) {
    const uint2 entry = params.doubtful[i];
    const uint32_t label = params.labels[entry.x];
    const int64_t head = entry.x / params.points_per_head;
    const __nv_bfloat16* point = params.points + static_cast<int64_t>(entry.x) * params.dim;
    const __nv_bfloat16* centroids = params.centroids + head * params.clusters * params.dim;
    const double found =
        dot(point, centroids + static_cast<int64_t>(label) * params.dim, params.dim);
    const double other =
        dot(point, centroids + static_cast<int64_t>(entry.y) * params.dim, params.dim);
    if ((threadIdx.x & 31) == 0) {
      const bool take_other = other > found || (other == found && entry.y < label);
      write_label(params, head, entry.x, take_other ? entry.y : label);
    }
  }
}

struct Candidate {
  double product;
  uint32_t column;
};

__device__ Candidate better(Candidate a, Candidate b) {
  return b.product > a.product || (b.product == a.product && b.column < a.column) ? b : a;
}

// A block for each point with more, against all centroids. The lanes of a warp share a centroid's
// row, 16 bytes each, as many rows at once as fit.
__global__ void __launch_bounds__(kSearchThreads) search_kernel(const AssignParams params) {
  __shared__ Candidate warp_best[kSearchThreads / 32];
  const RowLanes lanes(params.dim);
  const int warp = threadIdx.x / 32;
  const uint32_t count = params.doubtful_counts[1];
  const uint32_t last =
      static_cast<uint32_t>(params.heads) * static_cast<uint32_t>(params.points_per_head) - 1;
  for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    const uint32_t index = params.doubtful[last - i].x;
    const int64_t head = index / params.points_per_head;
    const auto* rows = reinterpret_cast<const uint4*>(params.centroids) +
                       head * params.clusters * lanes.lanes + lanes.column;
    float point[8];
    unpack(reinterpret_cast<const uint4*>(
               params.points)[static_cast<int64_t>(index) * lanes.lanes + lanes.column],
           point);
    Candidate best = {-INFINITY, 0xFFFFFFFFu};
    const int step = lanes.rows * (kSearchThreads / 32);
    for (int first = warp * lanes.rows; first < params.clusters; first += kUnroll * step) {
      uint4 raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = min(first + u * step + lanes.row, params.clusters - 1);
        raw[u] = __ldg(rows + static_cast<int64_t>(c) * lanes.lanes);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = first + u * step + lanes.row;
        float values[8];
        unpack(raw[u], values);
        double sum = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          sum = fma(static_cast<double>(point[e]), static_cast<double>(values[e]), sum);
        }
        for (int offset = 16; offset > 0; offset /= 2) {
          const double other = __shfl_down_sync(~0u, sum, offset);
          if (lanes.column + offset < lanes.lanes) sum += other;
        }
        if (lanes.column == 0 && lanes.row < lanes.rows && c < params.clusters) {
          best = better(best, {sum, static_cast<uint32_t>(c)});
        }
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      best = better(best, {__shfl_xor_sync(~0u, best.product, offset),
                           __shfl_xor_sync(~0u, best.column, offset)});
    }
    if (threadIdx.x % 32 == 0) warp_best[warp] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kSearchThreads / 32; ++w) best = better(best, warp_best[w]);
      write_label(params, head, index,
                  min(best.column, static_cast<uint32_t>(params.clusters - 1)));
      if (params.cosines) {
        params.cosines[index] = static_cast<float>(best.product) * params.inverse_norms[index];
      }
    }
    __syncthreads();
  }
}

}  // namespace

Status launch_resolve(const AssignParams& params, int multiprocessors, cudaStream_t stream) {
  pairs_kernel<<<4 * multiprocessors, kPairThreads, 0, stream>>>(params);
  search_kernel<<<2 * multiprocessors, kSearchThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "resolve kernels");
}

}  // namespace sqz::cuda
