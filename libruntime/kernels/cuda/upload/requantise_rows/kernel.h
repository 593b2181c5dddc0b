// Rows of 4 bits as rows of 8 bits (docs/format.md, "Rows of codes"), so that kernels that read an
// index know one kind of codes.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/dtype.h"
#include "formats/base/status.h"

namespace sqz::cuda {

// All in device memory, aligned to 16 bytes but for the scales.
struct RequantiseRows {
  const void* codes = nullptr;      // [rows, d / 2]
  const void* scales = nullptr;     // [rows]
  const float* rotation = nullptr;  // [d, d] as stored
  int64_t rows = 0;
  int32_t dim = 0;             // 64, 96, 128 or 256
  DType dtype = DType::kBF16;  // of scales: BF16 or F16
  void* out = nullptr;         // [rows, d]
  void* out_scales = nullptr;  // [rows] the largest magnitude of the residual over 127
};

// kUnsupported for a dim that there is no kernel for.
Status requantise_rows(const RequantiseRows& call, cudaStream_t stream);

}  // namespace sqz::cuda
