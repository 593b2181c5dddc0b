// Partial states of tiles whose keys were split, merged in the order of their keys: one warp a row.
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/prefill_attend/kernel.h"
#include "libruntime/kernels/cuda/prefill_attend/softmax.cuh"
#include "libruntime/kernels/cuda/prefill_common/rows.cuh"

namespace sqz::cuda::prefill {
namespace {

constexpr int kMergeThreads = 256;
constexpr int kMaxPairs = 4;  // of adjacent columns a lane, at d = 256

template <class T>
__device__ void merge_row(const AttendParams& params, const SplitTile& tile, int row,
                          int64_t query) {
  const int lane = threadIdx.x & 31, pairs = params.dim / 2;
  // A slot of a narrow tile has two states of every row.
  const int rows = params.narrow ? kRows / 2 : kRows, states = tile.parts * (kRows / rows);
  const int64_t first = static_cast<int64_t>(tile.slot) * kRows + row;
  const float* lse = params.partial_lse + first;
  float maximum = -INFINITY;
  for (int i = 0; i < states; ++i) maximum = fmaxf(maximum, lse[i * rows]);
  float sum = 0;
  float2 out[kMaxPairs] = {};
  for (int state = 0; state < states; ++state) {
    // A fault, NaN, stays one.
    const float own = lse[state * rows];
    const float weight = own == -INFINITY ? 0.0f : expf(own - maximum);
    sum += weight;
    const float2* from =
        reinterpret_cast<const float2*>(params.partial_out + (first + state * rows) * params.dim);
#pragma unroll
    for (int i = 0; i < kMaxPairs; ++i) {
      if (lane + 32 * i >= pairs) break;
      const float2 values = from[lane + 32 * i];
      out[i].x += weight * values.x;
      out[i].y += weight * values.y;
    }
  }
  const float inverse = sum == 0 ? 0.0f : 1 / sum;
  uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + query * params.dim);
#pragma unroll
  for (int i = 0; i < kMaxPairs; ++i) {
    if (lane + 32 * i >= pairs) break;
    to[lane + 32 * i] = pack_pair<T>(out[i].x * inverse, out[i].y * inverse);
  }
  if (lane == 0) params.lse[query] = sum == 0 ? -INFINITY : maximum + logf(sum);
}

template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ AttendParams params) {
  const int64_t rows = static_cast<int64_t>(params.counts->splits) * kRows;
  const int64_t warps = gridDim.x * (kMergeThreads / 32);
  for (int64_t i = blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32; i < rows; i += warps) {
    const SplitTile tile = params.splits[i / kRows];
    const int row = static_cast<int>(i % kRows);
    const int64_t query = query_index(params.tiles, block_of(params.blocks, tile.block),
                                      tile.kv_head, params.kv_heads, params.group, tile.tile, row);
    if (query >= 0) merge_row<T>(params, tile, row, query);
  }
}

}  // namespace

Status launch_merge(const AttendParams& params, DType dtype, int multiprocessors,
                    cudaStream_t stream) {
  auto* kernel = dtype == DType::kBF16 ? merge_kernel<__nv_bfloat16> : merge_kernel<__half>;
  kernel<<<4 * multiprocessors, kMergeThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "prefill merge kernel");
}

}  // namespace sqz::cuda::prefill
