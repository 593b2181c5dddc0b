// The kernels of one head dimension and their launches.
#pragma once

#include <algorithm>
#include <bit>

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/prefill_sm80/attend.cuh"
#include "libruntime/kernels/cuda/prefill_sm80/kernel.h"
#include "libruntime/kernels/cuda/prefill_sm80/lookup.cuh"
#include "libruntime/kernels/cuda/prefill_sm80/pages.cuh"

namespace sqz::cuda {

// Rows of `rows` query rows and `others` in shared memory; wide queries are there twice.
template <int kDim>
constexpr int64_t sm80_bytes(int rows, int others, bool wide) {
  return int64_t{(wide ? 2 * rows : rows) + others} * Sm80Tile<kDim>::kStride * 2;
}

template <int kDim>
Status launch_sm80_pages(const Sm80Lookup& call, cudaStream_t stream) {
  using Tile = Sm80Tile<kDim>;
  const LookupParams& p = call.token;
  const bool bf16 = p.dtype == DType::kBF16;
  const int64_t pairs = int64_t{call.blocks.count} * p.kv_heads;
  const int page_tiles = (p.level[0].clusters + Tile::kRows - 1) / Tile::kRows;
  constexpr int64_t bytes = sm80_bytes<kDim>(2 * kPageStream, 2 * Tile::kRows, true);
  static_assert(bytes <= kLeastBlockShared);
  if (call.policy == PrefillGroup::kAny) {
    SQZ_RETURN_IF_ERROR(launch_blocks(
        bf16 ? sm80_bounds_kernel<Bf16, kDim> : sm80_bounds_kernel<F16, kDim>, pairs * page_tiles,
        Tile::kThreads, bytes, Device(), stream, call, page_tiles));
    return sm80_choose(call, 0, stream);
  }
  const int rows = call.policy == PrefillGroup::kMax ? p.group : 1;
  const int columns = static_cast<int>(std::bit_ceil(static_cast<unsigned>(rows)));
  const int64_t groups = (call.blocks.count * columns + kPageStream - 1) / kPageStream;
  SQZ_RETURN_IF_ERROR(launch_blocks(sm80_parts_kernel<kDim>, pairs * rows * call.pieces,
                                    kPartThreads, 0, Device(), stream, call));
  SQZ_RETURN_IF_ERROR(
      launch_blocks(bf16 ? sm80_mean_bounds_kernel<Bf16, kDim> : sm80_mean_bounds_kernel<F16, kDim>,
                    groups * p.kv_heads * page_tiles, Tile::kThreads, bytes, Device(), stream, call,
                    page_tiles, columns));
  return sm80_choose(call, 0, stream);
}

template <int kDim>
Status launch_sm80_lookup(const Sm80Lookup& call, int level, cudaStream_t stream) {
  using Tile = Sm80Tile<kDim>;
  const LookupParams& p = call.token;
  if (p.pages) return launch_sm80_pages<kDim>(call, stream);
  const bool bf16 = p.dtype == DType::kBF16, wide = p.q_dtype != p.dtype;
  const int64_t pairs = int64_t{call.blocks.count} * p.kv_heads;
  const int row_tiles = (call.blocks.block_tokens * p.group + Tile::kRows - 1) / Tile::kRows;
  const int cluster_tiles = (p.level[level].clusters + Tile::kRows - 1) / Tile::kRows;
  SQZ_RETURN_IF_ERROR(
      launch_blocks(bf16 ? sm80_sums_kernel<Bf16, kDim> : sm80_sums_kernel<F16, kDim>,
                    pairs * row_tiles * kSm80Parts, Tile::kThreads,
                    sm80_bytes<kDim>(Tile::kRows, Tile::kStream, wide), Device(), stream, call,
                    level, row_tiles));
  SQZ_RETURN_IF_ERROR(sm80_lse(call, stream));
  SQZ_RETURN_IF_ERROR(
      launch_blocks(bf16 ? sm80_scores_kernel<Bf16, kDim> : sm80_scores_kernel<F16, kDim>,
                    pairs * std::max(cluster_tiles, 1), Tile::kThreads,
                    sm80_bytes<kDim>(Tile::kStream, Tile::kRows, wide), Device(), stream, call,
                    level, std::max(cluster_tiles, 1)));
  return sm80_choose(call, level, stream);
}

template <int kDim>
Status launch_sm80_attend(const Sm80Attend& call, cudaStream_t stream) {
  using Tile = Sm80Tile<kDim>;
  const AttendParams& p = call.params;
  const bool bf16 = p.dtype == DType::kBF16, wide = p.q_dtype != p.dtype;
  const int64_t pairs = int64_t{call.blocks.count} * p.kv_heads;
  static_assert(sm80_bytes<kDim>(Tile::kRows, 2 * Tile::kStream, true) <= kLeastBlockShared);
  Sm80Cut cut;
  cut.row_tiles = (call.blocks.block_tokens * p.group + Tile::kRows - 1) / Tile::kRows;
  const int64_t most = kSm80Waves * int64_t{p.device.multiprocessors} / (pairs * cut.row_tiles);
  const int64_t wanted = (p.slots + p.exact + kSm80LeastKeys - 1) / kSm80LeastKeys;
  cut.parts = static_cast<int>(std::max<int64_t>(1, std::min(most, wanted)));
  SQZ_RETURN_IF_ERROR(launch_blocks(
      bf16 ? sm80_attend_kernel<Bf16, kDim> : sm80_attend_kernel<F16, kDim>,
      pairs * cut.row_tiles * cut.parts, Tile::kThreads,
      sm80_bytes<kDim>(Tile::kRows, 2 * Tile::kStream, wide), Device(), stream, call, cut));
  return cut.parts > 1 ? sm80_merge(call, cut, Tile::kRows, stream) : Status();
}

}  // namespace sqz::cuda
