#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/prefill/attend/sm90/kernel.h"

namespace sqz::cuda {
namespace {

using namespace prefill;

// Sets the capacities and, where `base` is not null, the pointers. Returns the bytes used.
//
// The schedule splits no list into parts of less than a quarter of a multiprocessor's share, so the
// items of split lists are fewer than twice four a multiprocessor.
int64_t cut_workspace(PrefillAttendParams& params, int multiprocessors, uint8_t* base) {
  const int64_t tiles =
      int64_t{params.blocks.count} * params.shape.kv_heads * params.tiles.tiles_of_block;
  params.slot_capacity = 8 * multiprocessors;
  params.item_capacity = static_cast<int32_t>(tiles + params.slot_capacity);
  Layout layout(base);
  params.counts = layout.take<WorkCounts>(1);
  params.items = layout.take<WorkItem>(params.item_capacity);
  params.splits = layout.take<SplitTile>(params.slot_capacity);
  params.partial_lse = layout.take<float>(int64_t{params.slot_capacity} * kRows);
  params.partial_out = layout.take<float>(int64_t{params.slot_capacity} * kRows * params.shape.dim);
  return static_cast<int64_t>(layout.used());
}

PrefillAttendParams make_params(const PrefillAttend& call, int multiprocessors) {
  PrefillAttendParams params = {call};
  params.exact = static_cast<int32_t>(call.keys.exact - call.keys.exact_skipped);
  params.scale = call.shape.scale * static_cast<float>(M_LOG2E);
  // Where blocks are so short and lists so few, half a tile's rows would be empty.
  const bool few =
      call.blocks.block_tokens * call.shape.group <= kRows / 2 &&
      (call.own != nullptr || int64_t{call.blocks.count} * call.shape.kv_heads <= multiprocessors);
  params.tile_rows = few ? kRows / 2 : kRows;
  params.tiles = query_tiles(params.blocks, params.shape.group, params.tile_rows);
  params.tile_keys =
      tile_keys(params.shape.dim, few, params.masks != nullptr, params.keys.coded.present());
  return params;
}

template <class T>
Status launch(const PrefillAttendParams& params, int multiprocessors, cudaStream_t stream) {
  return for_dim(params.shape.dim, no_such_dim(params.shape.dim), [&](auto dim) {
    return launch_attend<T, dim.value>(params, multiprocessors, stream);
  });
}

}  // namespace

int64_t prefill_attend_workspace(const PrefillShape& shape, const QueryBlocks& blocks,
                                 int multiprocessors) {
  PrefillAttend call;
  call.shape = shape;
  call.blocks = blocks;
  PrefillAttendParams params = make_params(call, multiprocessors);
  return cut_workspace(params, multiprocessors, nullptr);
}

Status prefill_attend(const PrefillAttend& call, void* workspace, int64_t workspace_bytes,
                      int multiprocessors, cudaStream_t stream) {
  SQZ_RETURN_IF_ERROR(check_prefill(call.shape, call.blocks, true));
  PrefillAttendParams params = make_params(call, multiprocessors);
  const int64_t needed = cut_workspace(params, multiprocessors, static_cast<uint8_t*>(workspace));
  if (workspace_bytes < needed) {
    return {Code::kInvalidArgument, concat("prefill_attend: workspace of ", workspace_bytes,
                                           " bytes, ", needed, " needed")};
  }
  const int64_t tokens = call.blocks.block_tokens;
  if (call.masks != nullptr && (tokens > 32 || tokens * call.shape.group > kRows)) {
    return {Code::kInvalidArgument,
            concat("prefill_attend: masks for blocks of ", tokens,
                   " tokens, expected at most 32 of ", kRows, " query rows")};
  }
  const bool coded = call.keys.coded.present();
  const bool whole =
      call.selected.totals == nullptr || (call.own != nullptr && call.masks == nullptr);
  if (coded && !whole && (call.rows == nullptr || call.masks == nullptr)) {
    return {Code::kInvalidArgument, "prefill_attend: rows of 8 bits without rows or masks"};
  }
  if (coded && call.shape.dim > kMostCodedDim) return no_such_dim(call.shape.dim);
  if (call.blocks.count == 0 || call.blocks.tokens == 0) return {};
  SQZ_RETURN_IF_ERROR(launch_schedule(params, multiprocessors, stream));
  SQZ_RETURN_IF_ERROR(call.shape.dtype == DType::kBF16
                          ? launch<__nv_bfloat16>(params, multiprocessors, stream)
                          : launch<__half>(params, multiprocessors, stream));
  MergeSplits merge;
  merge.shape = params.shape;
  merge.blocks = params.blocks;
  merge.tiles = params.tiles;
  merge.dtype = params.shape.dtype;
  merge.out = params.out;
  merge.lse = params.lse;
  merge.rows = params.tile_rows;
  merge.partial_out = params.partial_out;
  merge.partial_lse = params.partial_lse;
  merge.splits = params.splits;
  merge.count = &params.counts->splits;
  const Device hopper = {.capability = 90, .compiled = 90, .multiprocessors = multiprocessors};
  return merge_splits(merge, hopper, stream);
}

}  // namespace sqz::cuda
