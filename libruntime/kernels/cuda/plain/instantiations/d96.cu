#include "libruntime/kernels/cuda/plain/launch.cuh"

namespace sqz::cuda {

template Status launch_plain_lookup<96>(const PlainLookup&, int, cudaStream_t);
template Status launch_plain_attend<96>(const PlainAttend&, cudaStream_t);

}  // namespace sqz::cuda
