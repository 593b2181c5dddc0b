#include "libruntime/kernels/cuda/decode_classify/launch.cuh"

namespace sqz::cuda {

template int classify_teams_at_once<128>(const ClassifyParams&, int, int);
template int64_t classify_bytes<128>(const ClassifyParams&, int, int);
template Status launch_classify<128>(const ClassifyParams&, int, int, cudaStream_t);

}  // namespace sqz::cuda
