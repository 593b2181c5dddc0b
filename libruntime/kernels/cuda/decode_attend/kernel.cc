#include "libruntime/kernels/cuda/decode_attend/kernel.h"

namespace sqz::cuda {

template <int kDim>
Status launch_attend(const AttendParams& params, cudaStream_t stream);

size_t decode_attend_workspace(int multiprocessors, int dim) {
  const size_t partial = (kAttendRows * (static_cast<size_t>(dim) + 2)) * sizeof(float);
  return kMostPairs * sizeof(uint32_t) + 2 * static_cast<size_t>(multiprocessors) * partial;
}

Status decode_attend(const AttendParams& params, cudaStream_t stream) {
  if (params.group < 1 || params.group > kAttendRows) {
    return {Code::kUnsupported, concat("CUDA: found ", params.group,
                                       " query heads a KV head, expected 1 to ", kAttendRows)};
  }
  switch (params.dim) {
    case 64:
      return launch_attend<64>(params, stream);
    case 96:
      return launch_attend<96>(params, stream);
    case 128:
      return launch_attend<128>(params, stream);
    case 256:
      return launch_attend<256>(params, stream);
    default:
      return {Code::kUnsupported,
              concat("CUDA: found head dimension ", params.dim, ", expected 64, 96, 128 or 256")};
  }
}

}  // namespace sqz::cuda
