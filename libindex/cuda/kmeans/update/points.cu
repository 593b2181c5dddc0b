// Norms and first centroids.
#include "libindex/cuda/kmeans.h"
#include "libindex/cuda/kmeans/update/fixed_point.cuh"
#include "libindex/cuda/kmeans/update/hash.cuh"
#include "libindex/cuda/kmeans/update/kernel.h"
#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 4;           // rows in flight, times those that a warp reads at once
constexpr float kSmallest = 1e-36f;  // squares of the norms that count as zero, as too large
constexpr float kLargest = 1e36f;

__global__ void __launch_bounds__(kThreads) norms_kernel(const UpdateParams params) {
  const RowLanes lanes(params.dim);
  const int64_t rows = static_cast<int64_t>(params.heads) * params.points_per_head;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  uint4 raw[kUnroll];
  bool real[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t row = (warp * kUnroll + u) * lanes.rows + lanes.row;
    real[u] = lanes.row < lanes.rows && row < rows;
    if (real[u]) {
      raw[u] =
          __ldg(reinterpret_cast<const uint4*>(params.points) + row * lanes.lanes + lanes.column);
    }
  }
  bool fault = false;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    float square = 0;
    if (real[u]) {
      float values[8];
      unpack(raw[u], values);
#pragma unroll
      for (int e = 0; e < 8; ++e) square = fmaf(values[e], values[e], square);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other = __shfl_down_sync(~0u, square, offset);
      if (lanes.column + offset < lanes.lanes) square += other;
    }
    if (real[u] && lanes.column == 0) {
      const bool good = square <= kLargest;  // false for NaN
      fault |= !good;
      params.inverse_norms[(warp * kUnroll + u) * lanes.rows + lanes.row] =
          good && square >= kSmallest ? 1 / sqrtf(square) : 0.0f;
    }
  }
  if (fault) atomicOr(params.fault, kKmeansFaultNotFinite);
}

__global__ void __launch_bounds__(kThreads) seed_kernel(const UpdateParams params) {
  const RowLanes lanes(params.dim);
  const int64_t cluster = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (cluster >= static_cast<int64_t>(params.heads) * params.clusters) return;
  const int64_t head = cluster / params.clusters, c = cluster % params.clusters;
  const int64_t first = c * params.points_per_head / params.clusters;
  const int64_t last = (c + 1) * params.points_per_head / params.clusters;
  const uint64_t head_seed =
      params.seeds != nullptr
          ? mix(params.seeds[head])
          : mix(mix(params.seed) + static_cast<uint64_t>(params.first_head + head));
  const uint64_t random = mix(head_seed + static_cast<uint64_t>(c));
  const int64_t point = first + static_cast<int64_t>(random % static_cast<uint64_t>(last - first));
  store_unit_point(params, cluster, head * params.points_per_head + point, lanes);
}

}  // namespace

Status launch_norms(const UpdateParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.heads} * params.points_per_head;
  const int64_t rows_per_block = int64_t{kWarps} * kUnroll * (32 / (params.dim / 8));
  norms_kernel<<<static_cast<unsigned>((rows + rows_per_block - 1) / rows_per_block), kThreads, 0,
                 stream>>>(params);
  return cuda_status(cudaGetLastError(), "norms kernel");
}

Status launch_seed(const UpdateParams& params, cudaStream_t stream) {
  const int64_t clusters = int64_t{params.heads} * params.clusters;
  seed_kernel<<<static_cast<unsigned>((clusters + kWarps - 1) / kWarps), kThreads, 0, stream>>>(
      params);
  return cuda_status(cudaGetLastError(), "seed kernel");
}

}  // namespace sqz::cuda
