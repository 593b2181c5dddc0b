#include "libruntime/kernels/cuda/decode_codes/launch.cuh"

namespace sqz::cuda {

template Status launch_codes<96>(const CodedParams&, int, cudaStream_t);
template int codes_teams_at_once<96>(const CodedParams&, int);

}  // namespace sqz::cuda
