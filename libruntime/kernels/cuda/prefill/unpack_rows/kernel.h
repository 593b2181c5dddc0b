// Rows of 8 bits as rows of 16 bits, for kernels that share what they read among many query tokens
// (docs/format.md, "Rows of codes").
#pragma once

#include "libruntime/kernels/cuda/decode/attend/kernel.h"

namespace sqz::cuda {

inline constexpr int kUnpackRows = 128;  // that a block of threads has

// The unpacked rows of a layer.
struct UnpackedRows {
  void *keys = nullptr, *values = nullptr;  // [Hkv, M, d or dv] of AttendParams::dtype
  // [2, Hkv, words] a bit a slot: those that lists have now, and those that are there.
  uint32_t* bits = nullptr;

  static constexpr int64_t tiles(int64_t slots) { return (slots + kUnpackRows - 1) / kUnpackRows; }
  static constexpr int64_t words(int64_t slots) { return tiles(slots) * (kUnpackRows / 32); }
};

// Nothing is there any more.
Status forget_rows(const AttendParams& params, const UnpackedRows& to, cudaStream_t stream);

// Unpacks the rows of params.coded that params.lists have, which are of `blocks` selections, and
// that are not there, each number rounded once; without lists all rows. Dimensions are multiples
// of 8. Unless `vectors` is null, adds to it a mean value for each cluster in the runs: no lookup
// has read it.
Status unpack_rows(const AttendParams& params, int64_t blocks, const UnpackedRows& to,
                   unsigned long long* vectors, cudaStream_t stream);

}  // namespace sqz::cuda
