// Both passes of the prefill lookup for one type and dimension.
#pragma once

#include "libruntime/kernels/cuda/prefill/lookup/sm90/columns.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/sm90/row_sums.cuh"

namespace sqz::cuda::prefill {

template <class Storage>
Status launch_pass(void (*kernel)(PrefillLookupParams, LookupMaps), int threads,
                   const ItemPlan& plan, const PrefillLookupParams& params, const LookupMaps& maps,
                   int multiprocessors, cudaStream_t stream) {
  constexpr size_t kShared = sizeof(Storage);
  static_assert(kShared <= kLookupSharedLimit);
  const int64_t items =
      int64_t{plan.row_tiles} * plan.pieces * params.blocks.count * params.shape.kv_heads;
  const int grid = static_cast<int>(items < multiprocessors ? items : multiprocessors);
  return launch_blocks(kernel, grid, threads, kShared, kHopper, stream, params, maps);
}

}  // namespace sqz::cuda::prefill

namespace sqz::cuda {

template <class T, int kDim>
Status launch_passes_sm90(const PrefillLookupParams& params, int multiprocessors,
                          cudaStream_t stream) {
  using namespace prefill;
  using Rows = RowSumConfig<kDim>;
  using Columns = ColumnConfig<kDim>;
  LookupMaps maps;
  SQZ_RETURN_IF_ERROR(encode_query_map(maps.queries, params.shape, params.queries,
                                       params.blocks.tokens, params.tiles.heads,
                                       params.tiles.tokens));
  LevelMaps own;
  LevelMaps& level = params.level.maps != nullptr ? *params.level.maps : own;
  if (!level.made) {
    SQZ_RETURN_IF_ERROR(encode_row_maps(level.centroids, params.level.centroids,
                                        params.shape.kv_heads, params.level.clusters, kDim));
    level.made = true;
  }
  maps.centroids = level.centroids;
  SQZ_RETURN_IF_ERROR(launch_pass<RowSumStorage<Rows>>(row_sums_kernel<T, Rows>, kRowSumThreads,
                                                       params.row_plan, params, maps,
                                                       multiprocessors, stream));
  SQZ_RETURN_IF_ERROR(launch_denominators(params, kHopper, stream));
  SQZ_RETURN_IF_ERROR(encode_query_map(maps.queries, params.shape, params.queries,
                                       params.blocks.tokens, params.chunks.heads,
                                       params.chunks.tokens));
  return launch_pass<ColumnStorage<Columns>>(columns_kernel<T, Columns>, Columns::kThreads,
                                             params.column_plan, params, maps, multiprocessors,
                                             stream);
}

}  // namespace sqz::cuda
