// The kernels of one head dimension and their launches.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/prefill/lookup/sm80/kernel.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/sm80/kernel.h"
#include "libruntime/kernels/cuda/prefill/lookup/sm80/pages.cuh"

namespace sqz::cuda {

template <int kDim>
Status launch_sm80_pages(const Sm80Lookup& call, cudaStream_t stream) {
  using Tile = Sm80Tile<kDim>;
  const LookupParams& p = call.token;
  const bool bf16 = p.dtype == DType::kBF16;
  const int64_t pairs = int64_t{call.blocks.count} * p.kv_heads;
  const int page_tiles = (p.level[0].clusters + Tile::kRows - 1) / Tile::kRows;
  constexpr int64_t bytes = sm80_bytes<kDim>(4 * kPageStream + 2 * Tile::kRows);
  static_assert(bytes <= kLeastBlockShared);
  const int64_t groups = (call.blocks.count + kPageStream - 1) / kPageStream;
  SQZ_RETURN_IF_ERROR(launch_blocks(sm80_parts_kernel<kDim>, pairs * call.pieces, kPartThreads, 0,
                                    Device(), stream, call));
  SQZ_RETURN_IF_ERROR(launch_blocks(
      bf16 ? sm80_bounds_kernel<Bf16, kDim> : sm80_bounds_kernel<F16, kDim>,
      groups * p.kv_heads * page_tiles, Tile::kThreads, bytes, Device(), stream, call, page_tiles));
  return sm80_choose(call, 0, stream);
}

template <int kDim>
Status launch_sm80_lookup(const Sm80Lookup& call, int level, cudaStream_t stream) {
  const LookupParams& p = call.token;
  if (p.pages) return launch_sm80_pages<kDim>(call, stream);
  const bool bf16 = p.dtype == DType::kBF16, wide = p.q_dtype != p.dtype;
  const int64_t pairs = int64_t{call.blocks.count} * p.kv_heads;
  const int rows = call.blocks.block_tokens * p.group;
  SQZ_RETURN_IF_ERROR(with_tiles<kDim>(wide, rows, [&](auto tiles) {
    using Tile = Sm80Tile<kDim, tiles.value>;
    const int row_tiles = (rows + Tile::kRows - 1) / Tile::kRows;
    return launch_blocks(
        bf16 ? sm80_sums_kernel<Bf16, kDim, tiles.value> : sm80_sums_kernel<F16, kDim, tiles.value>,
        pairs * row_tiles * kSm80Parts, Tile::kThreads,
        sm80_bytes<kDim>((wide ? 2 : 1) * Tile::kRows + 2 * Tile::kStream), Device(), stream, call,
        level, row_tiles);
  }));
  SQZ_RETURN_IF_ERROR(sm80_lse(call, stream));
  SQZ_RETURN_IF_ERROR(with_tiles<kDim>(wide, p.level[level].clusters, [&](auto tiles) {
    using Tile = Sm80Tile<kDim, tiles.value>;
    const int cluster_tiles =
        std::max((p.level[level].clusters + Tile::kRows - 1) / Tile::kRows, 1);
    return launch_blocks(bf16 ? sm80_scores_kernel<Bf16, kDim, tiles.value>
                              : sm80_scores_kernel<F16, kDim, tiles.value>,
                         pairs * cluster_tiles, Tile::kThreads,
                         sm80_bytes<kDim>(Tile::kRows + (wide ? 4 : 2) * Tile::kStream), Device(),
                         stream, call, level, cluster_tiles);
  }));
  return sm80_choose(call, level, stream);
}

}  // namespace sqz::cuda
