#include "libruntime/kernels/cuda/prefill/lookup/sm80/kernel.h"

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

template <int kDim>
Status launch_sm80_lookup(const Sm80Lookup& call, int level, cudaStream_t stream);

namespace {

Status look_up_level(const Sm80Lookup& call, int level, cudaStream_t stream) {
  return for_dim(call.token.dim, no_such_dim(call.token.dim),
                 [&](auto dim) { return launch_sm80_lookup<dim.value>(call, level, stream); });
}

}  // namespace

Status sm80_lookup(const Sm80Lookup& call, cudaStream_t stream) {
  const size_t pairs = static_cast<size_t>(call.blocks.count) * call.token.kv_heads;
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(call.faults, 0, pairs * sizeof(uint32_t), stream));
  for (int level = 0; level < call.token.levels; ++level) {
    SQZ_RETURN_IF_ERROR(look_up_level(call, level, stream));
  }
  return {};
}

}  // namespace sqz::cuda
