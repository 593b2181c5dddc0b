// Tiles of prompts whose keys were split: a warp for some columns of a row.
#include <algorithm>

#include "libruntime/kernels/cuda/prefill_attend/merge.cuh"
#include "libruntime/kernels/cuda/prefill_common/dependent.cuh"
#include "libruntime/kernels/cuda/prefill_common/rows.cuh"

namespace sqz::cuda::prefill {
namespace {

constexpr int kMergeThreads = 256;
constexpr int kBatch = 16;  // states whose rows are under way at once

template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ AttendChoice choice) {
  begin_dependent();
  const PrefillAttendParams& params = choice.params();
  const int parts = (params.shape.dim + kMergeColumns - 1) / kMergeColumns;
  const int64_t all = static_cast<int64_t>(params.counts->splits) * kRows * parts;
  const int64_t warps = gridDim.x * (kMergeThreads / 32);
  for (int64_t i = blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32; i < all; i += warps) {
    const SplitTile tile = params.splits[i / (kRows * parts)];
    const int within = static_cast<int>(i % (kRows * parts)), row = within / parts;
    const int64_t query =
        query_index(params.tiles, block_of(params.blocks, tile.block), tile.kv_head,
                    params.shape.kv_heads, params.shape.group, tile.tile, row);
    if (query < 0) continue;
    merge_row<T, kRows, kBatch>(params, tile.slot, tile.parts, row, within % parts * kMergeColumns,
                                query);
  }
}

}  // namespace

Status launch_merge(const AttendChoice& choice, DType dtype, int multiprocessors,
                    cudaStream_t stream) {
  auto* kernel = dtype == DType::kBF16 ? merge_kernel<__nv_bfloat16> : merge_kernel<__half>;
  // `all` has as many rows.
  const PrefillAttendParams& params = choice.lists;
  const int64_t tiles =
      int64_t{params.blocks.count} * params.shape.kv_heads * params.tiles.tiles_of_block;
  const int64_t warps = tiles * kRows * ((params.shape.dim + kMergeColumns - 1) / kMergeColumns);
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>(4 * multiprocessors, (warps * 32 + kMergeThreads - 1) / kMergeThreads));
  return launch_dependent(kernel, blocks, kMergeThreads, 0, stream, choice);
}

}  // namespace sqz::cuda::prefill
