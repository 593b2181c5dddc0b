#include "libruntime/kernels/cuda/decode_attend/launch.cuh"

namespace sqz::cuda {

template Status launch_attend<64>(const AttendParams&, cudaStream_t);

}  // namespace sqz::cuda
