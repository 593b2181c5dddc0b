// A warp merges 64 columns of a row.
#include <algorithm>

#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/prefill/attend/merge.h"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"

namespace sqz::cuda {
namespace {

constexpr int kMergeThreads = 256;
constexpr int kBatch = 16;  // states whose rows are under way at once

// Columns [first, first + 64), two a lane.
__device__ void merge_row(const MergeSplits& params, const SplitTile& tile, int row, int first,
                          int64_t query) {
  const int lane = threadIdx.x & 31, column = first + 2 * lane;
  const bool is = column < params.shape.dim;
  const int rows = params.rows, states = tile.parts;
  const int64_t at = static_cast<int64_t>(tile.slot) * rows + row;
  const float* lse = params.partial_lse + at;
  float maximum = -INFINITY;
  for (int i = lane; i < states; i += 32) maximum = fmaxf(maximum, lse[i * rows]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
  }
  maximum += 8;  // so that values of e^8 states can be added up
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
    store_2(params.dtype, out.x * inverse, out.y * inverse, params.out,
            query * params.shape.dim + column);
  }
  if (column == 0) params.lse[query] = sum == 0 ? -INFINITY : maximum + logf(sum);
}

__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ MergeSplits call) {
  begin_dependent();
  const QueryTiles& tiles = call.tiles;
  const int kv_heads = call.shape.kv_heads, columns = (call.shape.dim + 63) / 64;
  const int64_t count = call.splits != nullptr
                            ? int64_t{*call.count}
                            : int64_t{call.blocks.count} * kv_heads * tiles.tiles_of_block;
  const int64_t all = count * call.rows * columns;
  const int64_t warps = gridDim.x * (kMergeThreads / 32);
  for (int64_t i = blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32; i < all; i += warps) {
    const auto number = static_cast<int32_t>(i / (call.rows * columns));
    const int32_t list = number / tiles.tiles_of_block;
    SplitTile tile = {list / kv_heads,     list % kv_heads, number % tiles.tiles_of_block,
                      number * call.parts, call.parts,      {}};
    if (call.splits != nullptr) tile = call.splits[number];
    const int within = static_cast<int>(i % (call.rows * columns)), row = within / columns;
    const int64_t query = query_index(tiles, block_of(call.blocks, tile.block), tile.kv_head,
                                      kv_heads, call.shape.group, tile.tile, row);
    if (query >= 0) merge_row(call, tile, row, within % columns * 64, query);
  }
}

}  // namespace

Status merge_splits(const MergeSplits& call, const Device& device, cudaStream_t stream) {
  const int64_t tiles =
      int64_t{call.blocks.count} * call.shape.kv_heads * call.tiles.tiles_of_block;
  const int64_t warps = tiles * call.rows * ((call.shape.dim + 63) / 64);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(
      4 * device.multiprocessors, (warps * 32 + kMergeThreads - 1) / kMergeThreads));
  return launch_blocks(merge_kernel, blocks, kMergeThreads, 0, device, stream, call);
}

}  // namespace sqz::cuda
