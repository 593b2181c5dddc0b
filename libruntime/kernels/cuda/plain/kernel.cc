#include "libruntime/kernels/cuda/plain/kernel.h"

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

template <int kDim>
Status launch_plain_lookup(const PlainLookup& call, int level, cudaStream_t stream);
template <int kDim>
Status launch_plain_attend(const PlainAttend& call, cudaStream_t stream);

namespace {

constexpr size_t kMostRows = 64;  // of a row tile

Status look_up_level(const PlainLookup& call, int level, cudaStream_t stream) {
  return for_dim(call.token.dim, no_such_dim(call.token.dim),
                 [&](auto dim) { return launch_plain_lookup<dim.value>(call, level, stream); });
}

}  // namespace

Status plain_lookup(const PlainLookup& call, cudaStream_t stream) {
  const size_t pairs = static_cast<size_t>(call.blocks.count) * call.token.kv_heads;
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(call.faults, 0, pairs * sizeof(uint32_t), stream));
  for (int level = 0; level < call.token.levels; ++level) {
    SQZ_RETURN_IF_ERROR(look_up_level(call, level, stream));
  }
  return {};
}

size_t plain_attend_workspace(int multiprocessors, int dim) {
  return kPlainWaves * static_cast<size_t>(multiprocessors) * kMostRows *
         (static_cast<size_t>(dim) + 2) * sizeof(float);
}

Status plain_attend(const PlainAttend& call, cudaStream_t stream) {
  return for_dim(call.params.dim, no_such_dim(call.params.dim),
                 [&](auto dim) { return launch_plain_attend<dim.value>(call, stream); });
}

}  // namespace sqz::cuda
