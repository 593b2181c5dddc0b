// Attention of blocks of query tokens on GPUs before Hopper, and for calls that the Hopper kernels
// do not take, such as calls with queries of another type. It uses mma.sync, serves every shape and
// computes the same as decode_attend(), with the lists of prefill_lookup(). Pairs are numbered pair
// = block * Hkv + head.
#pragma once

#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/prefill/common/tiles.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"

namespace sqz::cuda {

// Attention cuts keys into parts, of at least so many keys each and for at most so many blocks of
// threads a multiprocessor, of so many rows or fewer.
inline constexpr int kSm80LeastKeys = 256;
inline constexpr int kSm80Waves = 4;
inline constexpr int kSm80Rows = 128;

// q, out, lse, shape, keys and lists (of pairs, or of heads) are in AttendParams; requests,
// counters and its workspace are not looked at.
struct Sm80Attend {
  AttendParams params;
  QueryBlocks blocks;
  float* partials = nullptr;  // of sm80_attend_workspace() bytes
};

// How rows and keys are cut.
struct Sm80Cut {
  QueryTiles tiles;
  int parts;
};

size_t sm80_attend_workspace(int multiprocessors, int value_dim);

// Results depend on the number of multiprocessors, not on timing.
Status sm80_attend(const Sm80Attend& call, cudaStream_t stream);

}  // namespace sqz::cuda
