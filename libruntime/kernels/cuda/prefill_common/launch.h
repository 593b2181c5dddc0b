// Launches of the prompt's kernels, one after the other.
#pragma once

#include <cuda_runtime_api.h>

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda::prefill {

// Launches `kernel` so that its blocks may begin while the kernel before it on the stream ends
// (programmatic dependent launch): it must call begin_dependent() before it touches what any
// kernel before it reads or writes. `what` names it in errors.
template <class... Params, class... Args>
Status launch_dependent(void (*kernel)(Params...), dim3 blocks, int threads, size_t shared_bytes,
                        cudaStream_t stream, const char* what, const Args&... args) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, args...), what);
}

}  // namespace sqz::cuda::prefill
