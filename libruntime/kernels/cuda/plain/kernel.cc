#include "libruntime/kernels/cuda/plain/kernel.h"

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {

template <int kDim>
Status launch_plain_lookup(const PlainLookup& call, int level, cudaStream_t stream);
template <int kDim>
Status launch_plain_attend(const PlainAttend& call, cudaStream_t stream);

namespace {

constexpr size_t kMostRows = 64;  // of a row tile

Status no_such_dim(int dim) {
  return {Code::kUnsupported,
          concat("CUDA: found head dimension ", dim, ", expected 64, 96, 128 or 256")};
}

Status look_up_level(const PlainLookup& call, int level, cudaStream_t stream) {
  switch (call.token.dim) {
    case 64:
      return launch_plain_lookup<64>(call, level, stream);
    case 96:
      return launch_plain_lookup<96>(call, level, stream);
    case 128:
      return launch_plain_lookup<128>(call, level, stream);
    case 256:
      return launch_plain_lookup<256>(call, level, stream);
    default:
      return no_such_dim(call.token.dim);
  }
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
  switch (call.params.dim) {
    case 64:
      return launch_plain_attend<64>(call, stream);
    case 96:
      return launch_plain_attend<96>(call, stream);
    case 128:
      return launch_plain_attend<128>(call, stream);
    case 256:
      return launch_plain_attend<256>(call, stream);
    default:
      return no_such_dim(call.params.dim);
  }
}

}  // namespace sqz::cuda
