#include "libruntime/kernels/cuda/decode_classify/launch.cuh"

namespace sqz::cuda {

template int64_t classify_bytes<96>(const ClassifyLayout&);
template int clusters_at_once<96>(int, const ClassifyLayout&, const Device&);
template Status launch_classify<96>(const ClassifyParams&, ClassifyTeam, const ClassifyLayout&,
                                    cudaStream_t);

}  // namespace sqz::cuda
