// Rows of 8 bits as rows of 16 bits, for kernels that share what they read among many query tokens
// (docs/format.md, "Rows of codes").
#pragma once

#include "libruntime/kernels/cuda/decode_attend/kernel.h"

namespace sqz::cuda {

// All rows of params.coded, rounded once, to `keys` and `values` [Hkv, M, d] of params.dtype. dim:
// a multiple of 8.
Status unpack_rows(const AttendParams& params, void* keys, void* values, cudaStream_t stream);

// Adds to *vectors the vectors that rows of codes stand on and that no lookup has read: a mean
// value for each cluster in the runs of params.lists, which are of pairs. Without lists all keys of
// `blocks` selections are read, and the mean keys as well.
Status count_means(const AttendParams& params, int64_t blocks, unsigned long long* vectors,
                   cudaStream_t stream);

}  // namespace sqz::cuda
