// The kernels of one head dimension and their launches.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/prefill/attend/merge.h"
#include "libruntime/kernels/cuda/prefill/attend/sm80/kernel.cuh"
#include "libruntime/kernels/cuda/prefill/attend/sm80/kernel.h"

namespace sqz::cuda {

// Parts of the keys of each of `tiles` row tiles: the fewest with which blocks, of which the GPU
// runs `resident` at once, end about as early as with any.
inline int parts_of(int64_t tiles, int64_t resident, int64_t most) {
  const auto rounds = [&](int64_t parts) { return (tiles * parts + resident - 1) / resident; };
  int64_t best = 1;
  for (int64_t parts = 2; parts <= most; ++parts) {
    if (rounds(parts) * best * 16 < rounds(best) * parts * 15) best = parts;
  }
  return static_cast<int>(best);
}

template <int kDim, int kValueDim = kDim>
Status launch_sm80_attend(const Sm80Attend& call, cudaStream_t stream) {
  const AttendParams& p = call.params;
  const bool bf16 = p.dtype == DType::kBF16, wide = p.q_dtype != p.dtype;
  const int64_t pairs = int64_t{call.blocks.count} * p.kv_heads;
  const int rows = call.blocks.block_tokens * p.group;
  return with_tiles<kDim>(wide, rows, [&](auto tiles) -> Status {
    using Tile = Sm80AttendTile<kDim, kValueDim, tiles.value>;
    static_assert(Tile::kRows <= kSm80Rows);
    static_assert(Tile::bytes(tiles.value == 1) + 2 * sizeof(Sm80Places<Tile::kStream>) <=
                  kLeastBlockShared);
    const int64_t bytes = Tile::bytes(wide);
    Sm80Cut cut;
    cut.tiles = query_tiles(call.blocks, p.group, Tile::kRows);
    const int64_t row_tiles = pairs * cut.tiles.tiles_of_block;
    const int64_t blocks = std::clamp<int64_t>(p.device.block_shared / bytes, 1, 2);
    const int64_t most = kSm80Waves * int64_t{p.device.multiprocessors} / row_tiles;
    const int64_t wanted = (p.slots + p.exact + kSm80LeastKeys - 1) / kSm80LeastKeys;
    cut.parts = parts_of(row_tiles, blocks * p.device.multiprocessors, std::min(most, wanted));
    SQZ_RETURN_IF_ERROR(launch_blocks(bf16 ? sm80_attend_kernel<Bf16, kDim, kValueDim, tiles.value>
                                           : sm80_attend_kernel<F16, kDim, kValueDim, tiles.value>,
                                      row_tiles * cut.parts, Tile::kThreads, bytes, Device(),
                                      stream, call, cut));
    if (cut.parts == 1) return {};
    MergeSplits merge;
    merge.shape = {p.dtype, p.value_dim, p.kv_heads, p.group, 0};
    merge.blocks = call.blocks;
    merge.tiles = cut.tiles;
    merge.dtype = p.q_dtype;
    merge.out = p.out;
    merge.lse = p.lse;
    merge.rows = Tile::kRows;
    merge.partial_out = call.partials;
    merge.partial_lse = call.partials + row_tiles * cut.parts * Tile::kRows * kValueDim;
    merge.parts = cut.parts;
    return merge_splits(merge, p.device, stream);
  });
}

}  // namespace sqz::cuda
