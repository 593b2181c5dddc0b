#include "libruntime/kernels/cuda/decode/attend/kernel.h"

#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

template <int kDim>
Status launch_attend(const AttendParams& params, cudaStream_t stream);

size_t decode_attend_workspace(int multiprocessors, int dim) {
  const size_t partial = (kMostGroup * (static_cast<size_t>(dim) + 2)) * sizeof(float);
  return kMostPairs * sizeof(uint32_t) + 2 * static_cast<size_t>(multiprocessors) * partial;
}

Status decode_attend(const AttendParams& params, cudaStream_t stream) {
  SQZ_RETURN_IF_ERROR(check_group(params.group));
  return for_dim(params.dim, no_such_dim(params.dim),
                 [&](auto dim) { return launch_attend<dim.value>(params, stream); });
}

}  // namespace sqz::cuda
