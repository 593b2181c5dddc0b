// Merges states of the same queries over disjoint keys on the GPU, as merge_rows() does on the CPU,
// and makes the state of no keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "libruntime/attention/lse_rows.h"

namespace sqz::cuda {

// b into a, in place. A row whose lse is NaN or +infinity in one of them becomes NaN: nothing waits
// for the GPU to say so.
struct MergeStatesParams {
  DType dtype = DType::kF32;  // of out: F32, F16 or BF16
  int64_t rows = 0, dim = 0;
  void* out_a = nullptr;  // [rows, dim]
  LseRows lse_a;          // natural
  const void* out_b = nullptr;
  ConstLseRows lse_b;
};

Status launch_merge_states(const MergeStatesParams& params, cudaStream_t stream);

// out_a 0 and lse_a -infinity; b is not looked at.
Status launch_clear_states(const MergeStatesParams& params, cudaStream_t stream);

}  // namespace sqz::cuda
