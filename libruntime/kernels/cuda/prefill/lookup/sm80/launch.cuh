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
  const int queries = call.blocks.block_tokens * shape.group;
  const auto pass = [&](auto scores, int rows, int parts) {
    return with_tiles<kDim>(wide, rows, [&](auto tiles) {
      constexpr bool kScores = decltype(scores)::value;
      using Tile = Sm80Tile<kDim, tiles.value>;
      const int row_tiles = std::max((rows + Tile::kRows - 1) / Tile::kRows, 1);
      const int stay = wide && !kScores ? 2 : 1, past = wide && kScores ? 4 : 2;
      return launch_blocks(bf16 ? sm80_pass_kernel<Bf16, kDim, tiles.value, kScores>
                                : sm80_pass_kernel<F16, kDim, tiles.value, kScores>,
                           pairs * row_tiles * parts, Tile::kThreads,
                           sm80_bytes<kDim>(stay * Tile::kRows + past * Tile::kStream), device,
                           stream, call, row_tiles);
    });
  };
  SQZ_RETURN_IF_ERROR(pass(std::false_type(), queries, call.row_plan.pieces));
  SQZ_RETURN_IF_ERROR(launch_denominators(call, device, stream));
  return pass(std::true_type(), call.level.clusters, 1);
}

}  // namespace sqz::cuda
