#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/prefill/lookup/kernel.h"

namespace sqz::cuda {
namespace {

using namespace prefill;

ItemPlan make_plan(int32_t tokens, int32_t block_tokens, int32_t tile, int32_t clusters) {
  const int32_t piece = kPieceTiles * tile;
  return {(block_tokens + tokens - 1) / tokens, tokens, tile, (clusters + piece - 1) / piece};
}

// For Hopper, tiles of its two kernels; else one tile of rows and parts of a fixed number.
PrefillLookupParams make_params(const PrefillLookup& call, bool sm90) {
  const PrefillShape& shape = call.shape;
  const QueryBlocks& blocks = call.blocks;
  const int32_t clusters = call.level.clusters;
  PrefillLookupParams params = {call};
  params.sm90 = sm90;
  params.scale = shape.scale * static_cast<float>(M_LOG2E);
  // Few rows leave a GPU idle unless many blocks share the clusters.
  params.row_plan.pieces = blocks.block_tokens > 1 ? kSm80Parts : 4 * kSm80Parts;
  params.column_plan.row_tiles = 1;
  params.page_pieces = std::clamp(blocks.block_tokens * shape.group / 256, 1, 16);
  if (!sm90) return params;
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
  if (!params.sm90) {
    params.parts = layout.take<float>(lists * params.page_pieces * 2 * params.shape.dim);
  }
  return static_cast<int64_t>(layout.used());
}

Status launch_passes(const PrefillLookupParams& params, const Device& device, cudaStream_t stream) {
  const int32_t dim = params.shape.dim;
  if (!params.sm90) {
    return for_sm80_dim(dim, no_such_dims(dim, dim), [&](auto d) {
      return launch_passes_sm80<d.value>(params, device, stream);
    });
  }
  return for_dim(dim, no_such_dim(dim), [&](auto d) {
    return params.shape.dtype == DType::kBF16
               ? launch_passes_sm90<__nv_bfloat16, d.value>(params, device.multiprocessors, stream)
               : launch_passes_sm90<__half, d.value>(params, device.multiprocessors, stream);
  });
}

SelectRuns select_of(const PrefillLookupParams& params) {
  SelectRuns select = {params};
  select.ids = params.ids;
  select.alive_sizes = params.alive_sizes;
  select.scores = params.columns;
  select.stride = params.level.clusters;
  select.tile_tokens = params.sm90 ? params.column_plan.tokens : 0;
  select.vectors = params.pages() ? 2 : 1;
  return select;
}

}  // namespace

int64_t prefill_lookup_workspace(const PrefillShape& shape, const QueryBlocks& blocks,
                                 int32_t clusters, bool sm90) {
  PrefillLookup call;
  call.shape = shape;
  call.blocks = blocks;
  call.level.clusters = clusters;
  PrefillLookupParams params = make_params(call, sm90);
  return cut_workspace(params, nullptr);
}

Status prefill_scores(const PrefillLookup& call, void* workspace, int64_t workspace_bytes,
                      const Device& device, bool sm90, cudaStream_t stream, SelectRuns& out) {
  SQZ_RETURN_IF_ERROR(check_prefill(call.shape, call.blocks, sm90));
  PrefillLookupParams params = make_params(call, sm90);
  const int64_t needed = cut_workspace(params, static_cast<uint8_t*>(workspace));
  if (workspace_bytes < needed) {
    return {Code::kInvalidArgument, concat("prefill_lookup: workspace of ", workspace_bytes,
                                           " bytes, ", needed, " needed")};
  }
  out = select_of(params);
  if (call.blocks.count == 0 || call.blocks.tokens == 0) return {};
  SQZ_RETURN_IF_ERROR(launch_prepare(params, device, stream));
  return launch_passes(params, device, stream);
}

Status prefill_lookup(const PrefillLookup& call, void* workspace, int64_t workspace_bytes,
                      const Device& device, bool sm90, cudaStream_t stream) {
  SelectRuns select;
  SQZ_RETURN_IF_ERROR(
      prefill_scores(call, workspace, workspace_bytes, device, sm90, stream, select));
  if (call.blocks.count == 0 || call.blocks.tokens == 0) return {};
  return launch_select(select, device, stream);
}

}  // namespace sqz::cuda
