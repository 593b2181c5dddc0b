#include "libruntime/kernels/cuda/decode_attend/launch.cuh"

namespace sqz::cuda {

template Status launch_attend<96>(const AttendParams&, cudaStream_t);

}  // namespace sqz::cuda
