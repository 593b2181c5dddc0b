// Writes what an index stores of the clusters: means, rows in slot order, clusters in tree order.
#include "libindex/cuda/kmeans.h"
#include "libindex/cuda/kmeans/update/fixed_point.cuh"
#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kScanThreads = 1024;
constexpr uint32_t kPartial = 64;  // rows that a lane adds in float32 before the float64 sum

// A warp a cluster; lane group r adds rows r, r + rows, ..., in that order.
template <class Element>
__global__ void __launch_bounds__(kThreads) means_kernel(const MeansParams params) {
  const KmeansShape shape = params.shape;
  const int64_t cluster = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (cluster >= static_cast<int64_t>(shape.heads) * shape.clusters) return;
  const int64_t head = cluster / shape.clusters;
  const uint32_t* offsets = params.offsets + head * (shape.clusters + 1) + cluster % shape.clusters;
  const uint32_t begin = offsets[0], end = offsets[1];
  const RowLanes lanes(shape.dim);
  const int64_t head_rows = head * shape.points;
  double sum[8] = {}, weight_sum = 0;
  if (lanes.row < lanes.rows) {
    for (uint32_t first = begin + lanes.row; first < end; first += kPartial * lanes.rows) {
      float partial[8] = {}, weight_partial = 0;
#pragma unroll 4
      for (uint32_t u = 0; u < kPartial; ++u) {
        const uint32_t place = first + u * lanes.rows;
        if (place >= end) break;
        const int64_t row = head_rows + params.order[head_rows + place];
        float values[8];
        unpack<Element>(
            __ldg(static_cast<const uint4*>(params.rows) + row * lanes.lanes + lanes.column),
            values);
        const float weight = params.weights ? static_cast<float>(params.weights[row]) : 1.0f;
        weight_partial += weight;
#pragma unroll
        for (int e = 0; e < 8; ++e) partial[e] = fmaf(weight, values[e], partial[e]);
      }
      weight_sum += weight_partial;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] += partial[e];
    }
  }
  auto fold = [&](double value) {
    double total = value;
    for (int r = 1; r < lanes.rows; ++r) {
      total += __shfl_sync(~0u, value, lanes.column + r * lanes.lanes);
    }
    return total;
  };
  weight_sum = fold(weight_sum);
  float mean[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const double total = fold(sum[e]);
    mean[e] = weight_sum > 0 ? static_cast<float>(total / weight_sum) : 0.0f;
  }
  if (lanes.row == 0) {
    store_row_part<Element>(static_cast<uint4*>(params.means) + cluster * lanes.lanes, lanes.column,
                            mean);
  }
}

__global__ void __launch_bounds__(kThreads) gather_kernel(const GatherParams params) {
  const int pieces = params.dim / 8;
  const int64_t total = static_cast<int64_t>(params.heads) * params.points * pieces;
  const auto* rows = static_cast<const uint4*>(params.rows);
  auto* out = static_cast<uint4*>(params.out);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = i / pieces, piece = i % pieces;
    const int64_t source = row / params.points * params.points + params.order[row];
    out[i] = __ldg(rows + source * pieces + piece);
  }
}

__global__ void __launch_bounds__(kScanThreads) new_offsets_kernel(const DepthFirstParams params) {
  const int64_t head = blockIdx.x;
  const int clusters = params.clusters;
  const int per_thread = (clusters + kScanThreads - 1) / kScanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * per_thread, clusters);
  const int end = min(begin + per_thread, clusters);
  const uint32_t* offsets = params.offsets + head * (clusters + 1);
  const uint32_t* order = params.cluster_order + head * clusters;
  uint32_t* out = params.new_offsets + head * (clusters + 1);
  auto size = [&](int c) { return offsets[order[c] + 1] - offsets[order[c]]; };
  uint32_t points = 0;
  for (int c = begin; c < end; ++c) points += size(c);
  uint32_t before = block_scan_1024(points).before;
  for (int c = begin; c < end; ++c) {
    out[c] = before;
    before += size(c);
  }
  if (threadIdx.x == 0) out[clusters] = static_cast<uint32_t>(params.points);
}

__global__ void __launch_bounds__(kThreads) new_order_kernel(const DepthFirstParams params) {
  const int64_t cluster = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (cluster >= static_cast<int64_t>(params.heads) * params.clusters) return;
  const int64_t head = cluster / params.clusters;
  const uint32_t old = params.cluster_order[cluster];
  const uint32_t* old_offsets = params.offsets + head * (params.clusters + 1) + old;
  const uint32_t to = params.new_offsets[cluster + head];
  const uint32_t* from = params.order + head * params.points + old_offsets[0];
  uint32_t* out = params.new_order + head * params.points + to;
  const uint32_t size = old_offsets[1] - old_offsets[0];
  for (uint32_t i = threadIdx.x & 31; i < size; i += 32) out[i] = from[i];
}

unsigned warps_grid(int64_t warps) {
  return static_cast<unsigned>((warps + kWarps - 1) / kWarps);
}

}  // namespace

Status cluster_means(const MeansParams& params, cudaStream_t stream) {
  const KmeansShape& shape = params.shape;
  if (shape.heads < 1 || shape.points < 1 || shape.clusters < 1 || shape.dim < 8 ||
      shape.dim > 256 || shape.dim % 8 != 0) {
    return {Code::kInvalidArgument,
            concat("cluster_means: ", shape.heads, " heads of ", shape.points, " rows of ",
                   shape.dim, " in ", shape.clusters,
                   " clusters; expected a row of a multiple of 8 components, 8 to 256")};
  }
  const unsigned grid = warps_grid(int64_t{shape.heads} * shape.clusters);
  if (params.float16) {
    means_kernel<F16><<<grid, kThreads, 0, stream>>>(params);
  } else {
    means_kernel<Bf16><<<grid, kThreads, 0, stream>>>(params);
  }
  return cuda_status(cudaGetLastError(), "means kernel");
}

Status gather_rows(const GatherParams& params, cudaStream_t stream) {
  if (params.heads < 1 || params.points < 1 || params.dim < 8 || params.dim % 8 != 0) {
    return {Code::kInvalidArgument,
            concat("gather_rows: ", params.heads, " x ", params.points, " x ", params.dim,
                   " is not a shape of at least 1 x 1 x 8 with dim a multiple of 8")};
  }
  const int64_t pieces = int64_t{params.heads} * params.points * (params.dim / 8);
  const int64_t blocks = (pieces + 4 * kThreads - 1) / (4 * kThreads);
  gather_kernel<<<static_cast<unsigned>(blocks < (1 << 20) ? blocks : 1 << 20), kThreads, 0,
                  stream>>>(params);
  return cuda_status(cudaGetLastError(), "gather kernel");
}

Status depth_first_order(const DepthFirstParams& params, cudaStream_t stream) {
  if (params.heads < 1 || params.clusters < 1 || params.points < params.clusters) {
    return {Code::kInvalidArgument,
            concat("depth_first_order: ", params.heads, " heads of ", params.points, " points in ",
                   params.clusters, " clusters is not a partition")};
  }
  new_offsets_kernel<<<static_cast<unsigned>(params.heads), kScanThreads, 0, stream>>>(params);
  new_order_kernel<<<warps_grid(int64_t{params.heads} * params.clusters), kThreads, 0, stream>>>(
      params);
  return cuda_status(cudaGetLastError(), "depth-first kernels");
}

}  // namespace sqz::cuda
