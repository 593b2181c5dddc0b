#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/prefill/lookup/sm90/kernel.h"

namespace sqz::cuda {
namespace {

using namespace prefill;

ItemPlan make_plan(int32_t tokens, int32_t block_tokens, int32_t tile, int32_t clusters) {
  const int32_t piece = kPieceTiles * tile;
  return {(block_tokens + tokens - 1) / tokens, tokens, tile, (clusters + piece - 1) / piece};
}

PrefillLookupParams make_params(const PrefillLookup& call) {
  const PrefillShape& shape = call.shape;
  const QueryBlocks& blocks = call.blocks;
  const int32_t clusters = call.level.clusters;
  PrefillLookupParams params = {call};
  params.tiles = query_tiles(blocks, shape.group, kLookupRows);
  for_dim(shape.dim, 0, [&](auto dim) {
    constexpr int kDim = dim.value;
    params.chunks = query_tiles(blocks, shape.group, kColumnRows);
    const int32_t tokens = params.chunks.tokens * ColumnConfig<kDim>::kQueryChunks;
    params.row_plan =
        make_plan(params.tiles.tokens, blocks.block_tokens, RowSumConfig<kDim>::kTile, clusters);
    params.column_plan = make_plan(tokens, blocks.block_tokens, kColumnTile, clusters);
    return 0;
  });
  params.scale = shape.scale * static_cast<float>(M_LOG2E);
  return params;
}

int64_t cut_workspace(PrefillLookupParams& params, uint8_t* base) {
  const int64_t lists = int64_t{params.blocks.count} * params.shape.kv_heads;
  const int64_t queries =
      int64_t{params.blocks.tokens} * params.shape.kv_heads * params.shape.group;
  Layout layout(base);
  params.taken = layout.take<uint32_t>(2);
  params.row_states = layout.take<float2>(params.row_plan.pieces * queries);
  params.lse = layout.take<float>(queries);
  params.columns = layout.take<float>(params.column_plan.row_tiles * lists * params.level.clusters);
  params.ids = layout.take<uint32_t>(lists * params.level.clusters);
  params.alive_sizes = layout.take<uint32_t>(lists * params.level.clusters);
  return static_cast<int64_t>(layout.used());
}

template <class T>
Status launch(const PrefillLookupParams& params, int multiprocessors, cudaStream_t stream) {
  return for_dim(params.shape.dim, no_such_dim(params.shape.dim), [&](auto dim) {
    return launch_lookup_passes<T, dim.value>(params, multiprocessors, stream);
  });
}

}  // namespace

int64_t prefill_lookup_workspace(const PrefillShape& shape, const QueryBlocks& blocks,
                                 int32_t clusters) {
  PrefillLookup call;
  call.shape = shape;
  call.blocks = blocks;
  call.level.clusters = clusters;
  PrefillLookupParams params = make_params(call);
  return cut_workspace(params, nullptr);
}

Status prefill_lookup(const PrefillLookup& call, void* workspace, int64_t workspace_bytes,
                      int multiprocessors, cudaStream_t stream) {
  SQZ_RETURN_IF_ERROR(check_prefill(call.shape, call.blocks));
  PrefillLookupParams params = make_params(call);
  const int64_t needed = cut_workspace(params, static_cast<uint8_t*>(workspace));
  if (workspace_bytes < needed) {
    return {Code::kInvalidArgument, concat("prefill_lookup: workspace of ", workspace_bytes,
                                           " bytes, ", needed, " needed")};
  }
  if (call.blocks.count == 0 || call.blocks.tokens == 0) return {};
  SQZ_RETURN_IF_ERROR(launch_prepare(params, stream));
  SQZ_RETURN_IF_ERROR(call.shape.dtype == DType::kBF16
                          ? launch<__nv_bfloat16>(params, multiprocessors, stream)
                          : launch<__half>(params, multiprocessors, stream));
  return launch_select(params, stream);
}

}  // namespace sqz::cuda
