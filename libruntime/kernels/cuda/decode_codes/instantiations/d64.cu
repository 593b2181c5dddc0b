#include "libruntime/kernels/cuda/decode_codes/launch.cuh"

namespace sqz::cuda {

template Status launch_codes<64>(const CodedParams&, int, cudaStream_t);
template int codes_teams_at_once<64>(const CodedParams&, int);

}  // namespace sqz::cuda
