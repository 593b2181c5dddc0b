#include "libruntime/kernels/cuda/prefill/attend/sm80/kernel.h"

#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

template <int kDim, int kValueDim>
Status launch_sm80_attend(const Sm80Attend& call, cudaStream_t stream);

size_t sm80_attend_workspace(int multiprocessors, int value_dim) {
  return kSm80Waves * static_cast<size_t>(multiprocessors) * kSm80Rows *
         (static_cast<size_t>(value_dim) + 2) * sizeof(float);
}

Status sm80_attend(const Sm80Attend& call, cudaStream_t stream) {
  const int dim = call.params.dim, values = call.params.value_dim;
  return for_dims(dim, values, no_such_dims(dim, values), [&](auto d, auto dv) {
    return launch_sm80_attend<d.value, dv.value>(call, stream);
  });
}

}  // namespace sqz::cuda
