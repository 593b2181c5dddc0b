#include "libruntime/kernels/cuda/prefill/attend/sm80/kernel.h"

#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

template <int kDim>
Status launch_sm80_attend(const Sm80Attend& call, cudaStream_t stream);

size_t sm80_attend_workspace(int multiprocessors, int dim) {
  return kSm80Waves * static_cast<size_t>(multiprocessors) * kSm80Rows *
         (static_cast<size_t>(dim) + 2) * sizeof(float);
}

Status sm80_attend(const Sm80Attend& call, cudaStream_t stream) {
  return for_dim(call.params.dim, no_such_dim(call.params.dim),
                 [&](auto dim) { return launch_sm80_attend<dim.value>(call, stream); });
}

}  // namespace sqz::cuda
