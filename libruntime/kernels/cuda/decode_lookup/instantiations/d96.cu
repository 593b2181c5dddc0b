#include "libruntime/kernels/cuda/decode_lookup/launch.cuh"

namespace sqz::cuda {

template Status launch_lookup<96>(const LookupParams&, int, cudaStream_t);
template int lookup_teams_at_once<96>(const LookupParams&, int);

}  // namespace sqz::cuda
