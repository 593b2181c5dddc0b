#include "libruntime/kernels/cuda/batch_lookup/logits.cuh"

namespace sqz::cuda {

template Status launch_batch_logits<128>(const BatchLookup&, int, int, cudaStream_t);

}  // namespace sqz::cuda
