// The kernels of one head dimension and their launches.
#pragma once

#include <algorithm>
#include <bit>

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/plain/attend.cuh"
#include "libruntime/kernels/cuda/plain/kernel.h"
#include "libruntime/kernels/cuda/plain/lookup.cuh"
#include "libruntime/kernels/cuda/plain/pages.cuh"

namespace sqz::cuda {

// Rows of `rows` query rows and `others` in shared memory; wide queries are there twice.
template <int kDim>
constexpr int64_t plain_bytes(int rows, int others, bool wide) {
  return int64_t{(wide ? 2 * rows : rows) + others} * PlainTile<kDim>::kStride * 2;
}

template <int kDim>
Status launch_plain_pages(const PlainLookup& call, cudaStream_t stream) {
  using Tile = PlainTile<kDim>;
  const LookupParams& p = call.token;
  const bool bf16 = p.dtype == DType::kBF16;
  const int64_t pairs = int64_t{call.blocks.count} * p.kv_heads;
  const int page_tiles = (p.level[0].clusters + Tile::kRows - 1) / Tile::kRows;
  constexpr int64_t bytes = plain_bytes<kDim>(2 * kPageStream, 2 * Tile::kRows, true);
  static_assert(bytes <= kLeastBlockShared);
  if (call.policy == PrefillGroup::kAny) {
    SQZ_RETURN_IF_ERROR(launch_blocks(
        bf16 ? plain_bounds_kernel<Bf16, kDim> : plain_bounds_kernel<F16, kDim>, pairs * page_tiles,
        Tile::kThreads, bytes, Device(), stream, call, page_tiles));
    return plain_choose(call, 0, stream);
  }
  const int rows = call.policy == PrefillGroup::kMax ? p.group : 1;
  const int columns = static_cast<int>(std::bit_ceil(static_cast<unsigned>(rows)));
  const int64_t groups = (call.blocks.count * columns + kPageStream - 1) / kPageStream;
  SQZ_RETURN_IF_ERROR(launch_blocks(plain_parts_kernel<kDim>, pairs * rows * call.pieces,
                                    kPartThreads, 0, Device(), stream, call));
  SQZ_RETURN_IF_ERROR(launch_blocks(
      bf16 ? plain_mean_bounds_kernel<Bf16, kDim> : plain_mean_bounds_kernel<F16, kDim>,
      groups * p.kv_heads * page_tiles, Tile::kThreads, bytes, Device(), stream, call, page_tiles,
      columns));
  return plain_choose(call, 0, stream);
}

template <int kDim>
Status launch_plain_lookup(const PlainLookup& call, int level, cudaStream_t stream) {
  using Tile = PlainTile<kDim>;
  const LookupParams& p = call.token;
  if (p.pages) return launch_plain_pages<kDim>(call, stream);
  const bool bf16 = p.dtype == DType::kBF16, wide = p.q_dtype != p.dtype;
  const int64_t pairs = int64_t{call.blocks.count} * p.kv_heads;
  const int row_tiles = (call.blocks.block_tokens * p.group + Tile::kRows - 1) / Tile::kRows;
  const int cluster_tiles = (p.level[level].clusters + Tile::kRows - 1) / Tile::kRows;
  SQZ_RETURN_IF_ERROR(
      launch_blocks(bf16 ? plain_sums_kernel<Bf16, kDim> : plain_sums_kernel<F16, kDim>,
                    pairs * row_tiles * kPlainParts, Tile::kThreads,
                    plain_bytes<kDim>(Tile::kRows, Tile::kStream, wide), Device(), stream, call,
                    level, row_tiles));
  SQZ_RETURN_IF_ERROR(plain_lse(call, stream));
  SQZ_RETURN_IF_ERROR(
      launch_blocks(bf16 ? plain_scores_kernel<Bf16, kDim> : plain_scores_kernel<F16, kDim>,
                    pairs * std::max(cluster_tiles, 1), Tile::kThreads,
                    plain_bytes<kDim>(Tile::kStream, Tile::kRows, wide), Device(), stream, call,
                    level, std::max(cluster_tiles, 1)));
  return plain_choose(call, level, stream);
}

template <int kDim>
Status launch_plain_attend(const PlainAttend& call, cudaStream_t stream) {
  using Tile = PlainTile<kDim>;
  const AttendParams& p = call.params;
  const bool bf16 = p.dtype == DType::kBF16, wide = p.q_dtype != p.dtype;
  const int64_t pairs = int64_t{call.blocks.count} * p.kv_heads;
  static_assert(plain_bytes<kDim>(Tile::kRows, 2 * Tile::kStream, true) <= kLeastBlockShared);
  PlainCut cut;
  cut.row_tiles = (call.blocks.block_tokens * p.group + Tile::kRows - 1) / Tile::kRows;
  const int64_t most = kPlainWaves * int64_t{p.device.multiprocessors} / (pairs * cut.row_tiles);
  const int64_t wanted = (p.slots + p.exact + kPlainLeastKeys - 1) / kPlainLeastKeys;
  cut.parts = static_cast<int>(std::max<int64_t>(1, std::min(most, wanted)));
  SQZ_RETURN_IF_ERROR(launch_blocks(
      bf16 ? plain_attend_kernel<Bf16, kDim> : plain_attend_kernel<F16, kDim>,
      pairs * cut.row_tiles * cut.parts, Tile::kThreads,
      plain_bytes<kDim>(Tile::kRows, 2 * Tile::kStream, wide), Device(), stream, call, cut));
  return cut.parts > 1 ? plain_merge(call, cut, Tile::kRows, stream) : Status();
}

}  // namespace sqz::cuda
