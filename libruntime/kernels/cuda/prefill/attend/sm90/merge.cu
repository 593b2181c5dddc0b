// Partial states of tiles whose keys were split, merged in the order of their keys: a warp for 64
// columns of a row.
#include <algorithm>

#include "libruntime/kernels/cuda/prefill/attend/sm90/kernel.h"
#include "libruntime/kernels/cuda/prefill/attend/sm90/softmax.cuh"
#include "libruntime/kernels/cuda/prefill/common/dependent.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"

namespace sqz::cuda::prefill {
namespace {

constexpr int kMergeThreads = 256;
constexpr int kBatch = 16;  // states whose rows are under way at once

// Columns [first, first + 64), two a lane.
template <class T>
__device__ void merge_row(const PrefillAttendParams& params, const SplitTile& tile, int row,
                          int first, int64_t query) {
  const int lane = threadIdx.x & 31, column = first + 2 * lane;
  const bool is = column < params.shape.dim;
  const int rows = params.slot_rows(), states = tile.parts;
  const int64_t at = static_cast<int64_t>(tile.slot) * rows + row;
  const float* lse = params.partial_lse + at;
  float maximum = -INFINITY;
  for (int i = lane; i < states; i += 32) maximum = fmaxf(maximum, lse[i * rows]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
  }
  float sum = 0;
  float2 out = {0, 0};
  const float* from = params.partial_out + at * params.shape.dim + (is ? column : 0);
  const int64_t stride = int64_t{rows} * params.shape.dim;
  // A lane has the weight of one of 32 states.
  for (int begin = 0; begin < states; begin += 32) {
    const int count = min(32, states - begin);
    // A fault, NaN, stays one.
    const float own = lane < count ? lse[(begin + lane) * rows] : -INFINITY;
    const float own_weight = own == -INFINITY ? 0.0f : expf(own - maximum);
    for (int batch = 0; batch < count; batch += kBatch) {
      float2 values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // Past the last one, it once more: its weight is then 0.
        values[i] =
            *reinterpret_cast<const float2*>(from + (begin + min(batch + i, count - 1)) * stride);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = __shfl_sync(~0u, own_weight, batch + i);
        sum += weight;
        out.x += weight * values[i].x;
        out.y += weight * values[i].y;
      }
    }
  }
  const float inverse = sum == 0 ? 0.0f : 1 / sum;
  if (is) {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + query * params.shape.dim + column) =
        pack_pair<T>(out.x * inverse, out.y * inverse);
  }
  if (column == 0) params.lse[query] = sum == 0 ? -INFINITY : maximum + logf(sum);
}

template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ PrefillAttendParams params) {
  begin_dependent();
  const int rows = params.slot_rows(), parts = (params.shape.dim + 63) / 64;
  const int64_t all = static_cast<int64_t>(params.counts->splits) * rows * parts;
  const int64_t warps = gridDim.x * (kMergeThreads / 32);
  for (int64_t i = blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32; i < all; i += warps) {
    const SplitTile tile = params.splits[i / (rows * parts)];
    const int within = static_cast<int>(i % (rows * parts)), row = within / parts;
    const int64_t query =
        query_index(params.tiles, block_of(params.blocks, tile.block), tile.kv_head,
                    params.shape.kv_heads, params.shape.group, tile.tile, row);
    if (query >= 0) merge_row<T>(params, tile, row, within % parts * 64, query);
  }
}

}  // namespace

Status launch_merge(const PrefillAttendParams& params, int multiprocessors, cudaStream_t stream) {
  const bool bf16 = params.shape.dtype == DType::kBF16;
  auto* kernel = bf16 ? merge_kernel<__nv_bfloat16> : merge_kernel<__half>;
  const int64_t tiles =
      int64_t{params.blocks.count} * params.shape.kv_heads * params.tiles.tiles_of_block;
  const int64_t warps = tiles * params.slot_rows() * ((params.shape.dim + 63) / 64);
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>(4 * multiprocessors, (warps * 32 + kMergeThreads - 1) / kMergeThreads));
  return launch_dependent(kernel, blocks, kMergeThreads, 0, stream, params);
}

}  // namespace sqz::cuda::prefill
