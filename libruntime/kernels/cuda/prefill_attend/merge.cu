// Partial states of tiles whose keys were split, merged in the order of their keys: one warp a row.
#include "libruntime/kernels/cuda/prefill_attend/kernel.h"
#include "libruntime/kernels/cuda/prefill_attend/softmax.cuh"
#include "libruntime/kernels/cuda/prefill_common/dependent.cuh"
#include "libruntime/kernels/cuda/prefill_common/rows.cuh"

namespace sqz::cuda::prefill {
namespace {

constexpr int kMergeThreads = 256;
constexpr int kBatch = 8;  // states whose rows are under way at once

// kPairs: of adjacent columns a lane.
template <class T, int kPairs>
__device__ void merge_row(const AttendParams& params, const SplitTile& tile, int row,
                          int64_t query) {
  const int lane = threadIdx.x & 31, pairs = params.dim / 2;
  // A slot of a narrow tile has two states of every row.
  const int rows = params.narrow ? kRows / 2 : kRows, states = tile.parts * (kRows / rows);
  const int64_t first = static_cast<int64_t>(tile.slot) * kRows + row;
  const float* lse = params.partial_lse + first;
  float maximum = -INFINITY;
  for (int i = lane; i < states; i += 32) maximum = fmaxf(maximum, lse[i * rows]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
  }
  float sum = 0;
  float2 out[kPairs] = {};
  const auto* from = reinterpret_cast<const float2*>(params.partial_out + first * params.dim);
  const int64_t stride = int64_t{rows} * pairs;
  // A lane has the weight of one of 32 states.
  for (int begin = 0; begin < states; begin += 32) {
    const int count = min(32, states - begin);
    // A fault, NaN, stays one.
    const float own = lane < count ? lse[(begin + lane) * rows] : -INFINITY;
    const float own_weight = own == -INFINITY ? 0.0f : expf(own - maximum);
    for (int batch = 0; batch < count; batch += kBatch) {
      float2 values[kBatch][kPairs];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // Past the last one, it once more: its weight is then 0.
        const float2* row_of = from + (begin + min(batch + i, count - 1)) * stride;
#pragma unroll
        for (int p = 0; p < kPairs; ++p) values[i][p] = row_of[min(lane + 32 * p, pairs - 1)];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = __shfl_sync(~0u, own_weight, batch + i);
        sum += weight;
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          out[p].x += weight * values[i][p].x;
          out[p].y += weight * values[i][p].y;
        }
      }
    }
  }
  const float inverse = sum == 0 ? 0.0f : 1 / sum;
  uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + query * params.dim);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (lane + 32 * i >= pairs) continue;
    to[lane + 32 * i] = pack_pair<T>(out[i].x * inverse, out[i].y * inverse);
  }
  if (lane == 0) params.lse[query] = sum == 0 ? -INFINITY : maximum + logf(sum);
}

template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ AttendParams params) {
  begin_dependent();
  const int64_t rows = static_cast<int64_t>(params.counts->splits) * kRows;
  const int64_t warps = gridDim.x * (kMergeThreads / 32);
  for (int64_t i = blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32; i < rows; i += warps) {
    const SplitTile tile = params.splits[i / kRows];
    const int row = static_cast<int>(i % kRows);
    const int64_t query = query_index(params.tiles, block_of(params.blocks, tile.block),
                                      tile.kv_head, params.kv_heads, params.group, tile.tile, row);
    if (query < 0) continue;
    if (params.dim <= 64) {
      merge_row<T, 1>(params, tile, row, query);
    } else if (params.dim <= 128) {
      merge_row<T, 2>(params, tile, row, query);
    } else {
      merge_row<T, 4>(params, tile, row, query);
    }
  }
}

}  // namespace

Status launch_merge(const AttendParams& params, DType dtype, int multiprocessors,
                    cudaStream_t stream) {
  auto* kernel = dtype == DType::kBF16 ? merge_kernel<__nv_bfloat16> : merge_kernel<__half>;
  return launch_dependent(kernel, 4 * multiprocessors, kMergeThreads, 0, stream,
                          "prefill merge kernel", params);
}

}  // namespace sqz::cuda::prefill
