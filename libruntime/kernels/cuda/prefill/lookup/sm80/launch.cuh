// The kernels of one head dimension and their launches.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/prefill/lookup/sm80/pages.cuh"

namespace sqz::cuda {

template <int kDim>
Status launch_pages_sm80(const PrefillLookupParams& call, const Device& device,
                         cudaStream_t stream) {
  using Tile = Sm80Tile<kDim>;
  const int heads = call.shape.kv_heads;
  const int page_tiles = (call.level.clusters + Tile::kRows - 1) / Tile::kRows;
  constexpr int64_t bytes = sm80_bytes<kDim>(4 * kPageStream + 2 * Tile::kRows);
  static_assert(bytes <= kLeastBlockShared);
  const int groups = (call.blocks.count + kPageStream - 1) / kPageStream;
  SQZ_RETURN_IF_ERROR(launch_blocks(sm80_parts_kernel<kDim>,
                                    call.blocks.count * heads * call.page_pieces, kPartThreads, 0,
                                    device, stream, call));
  return launch_blocks(call.shape.dtype == DType::kBF16 ? sm80_bounds_kernel<Bf16, kDim>
                                                        : sm80_bounds_kernel<F16, kDim>,
                       groups * heads * page_tiles, Tile::kThreads, bytes, device, stream, call,
                       page_tiles);
}

template <int kDim>
Status launch_passes_sm80(const PrefillLookupParams& call, const Device& device,
                          cudaStream_t stream) {
  if (call.pages()) {
    if constexpr (kDim > 256) return no_such_dim(kDim);  // their tiles do not fit
    if constexpr (kDim <= 256) return launch_pages_sm80<kDim>(call, device, stream);
  }
  const PrefillShape& shape = call.shape;
  const bool bf16 = shape.dtype == DType::kBF16, wide = call.q_dtype != shape.dtype;
  const int pairs = call.blocks.count * shape.kv_heads;
  const int rows = call.blocks.block_tokens * shape.group;
  SQZ_RETURN_IF_ERROR(with_tiles<kDim>(wide, rows, [&](auto tiles) {
    using Tile = Sm80Tile<kDim, tiles.value>;
    const int row_tiles = (rows + Tile::kRows - 1) / Tile::kRows;
    return launch_blocks(
        bf16 ? sm80_sums_kernel<Bf16, kDim, tiles.value> : sm80_sums_kernel<F16, kDim, tiles.value>,
        pairs * row_tiles * call.row_plan.pieces, Tile::kThreads,
        sm80_bytes<kDim>((wide ? 2 : 1) * Tile::kRows + 2 * Tile::kStream), device, stream, call,
        row_tiles);
  }));
  SQZ_RETURN_IF_ERROR(launch_denominators(call, device, stream));
  return with_tiles<kDim>(wide, call.level.clusters, [&](auto tiles) {
    using Tile = Sm80Tile<kDim, tiles.value>;
    const int cluster_tiles = std::max((call.level.clusters + Tile::kRows - 1) / Tile::kRows, 1);
    return launch_blocks(bf16 ? sm80_scores_kernel<Bf16, kDim, tiles.value>
                              : sm80_scores_kernel<F16, kDim, tiles.value>,
                         pairs * cluster_tiles, Tile::kThreads,
                         sm80_bytes<kDim>(Tile::kRows + (wide ? 4 : 2) * Tile::kStream), device,
                         stream, call, cluster_tiles);
  });
}

}  // namespace sqz::cuda
