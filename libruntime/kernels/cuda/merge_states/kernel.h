// Merges states of the same queries over disjoint keys on the GPU, as merge_rows() does on the CPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "formats/base/dtype.h"
#include "formats/base/status.h"

namespace sqz::cuda {

// b into a, in place. A row whose lse is NaN or +infinity in one of them becomes NaN: nothing waits
// for the GPU to say so.
struct MergeStatesParams {
  DType dtype = DType::kF32;  // of out: F32, F16 or BF16
  int64_t rows = 0, dim = 0;
  void* out_a = nullptr;         // [rows, dim]
  float* lse_a = nullptr;        // [rows] natural
  const void* out_b = nullptr;   // [rows, dim]
  const float* lse_b = nullptr;  // [rows]
};

Status launch_merge_states(const MergeStatesParams& params, cudaStream_t stream);

}  // namespace sqz::cuda
