// Rows of codes as rows of 16 bits, for kernels that share what they read among many query tokens
// (docs/format.md, "Rows of codes").
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "formats/coded_rows.h"
#include "libruntime/kernels/cuda/common/run_lists.h"

namespace sqz::cuda {

// The finest clusters of a layer.
struct FinestClusters {
  const uint32_t* offsets = nullptr;  // [Hkv, n + 1] first slot
  int32_t clusters = 0;               // n
  int32_t kv_heads = 0;
};

struct UnpackRows {
  CodedRows rows;  // [Hkv, M, d] in device memory, of 8 or 4 bits
  FinestClusters finest;
  const void* means = nullptr;         // [Hkv, n, d] what the rows are residuals to
  const float* turned_back = nullptr;  // [d, d] the rotation transposed; for 4 bits
  int64_t slots = 0;                   // M
  int32_t dim = 0;                     // d, a multiple of 8 up to 256
  DType dtype = DType::kBF16;          // of scales, means and out: BF16 or F16
  void* out = nullptr;                 // [Hkv, M, d]; rounded once
};

Status unpack_rows(const UnpackRows& call, cudaStream_t stream);

// Adds to *vectors the vectors that rows of codes stand on and that no lookup has read: a mean
// value for each cluster in a pair's runs. Without lists all keys of `blocks` selections are read,
// and the mean keys as well.
Status count_means(const RunLists& lists, const FinestClusters& finest, int64_t blocks,
                   unsigned long long* vectors, cudaStream_t stream);

}  // namespace sqz::cuda
