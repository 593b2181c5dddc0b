// Launches of the prompt's kernels, one after the other.
#pragma once

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/launch_options.h"

namespace sqz::cuda::prefill {

// Launches `kernel` so that its blocks may begin while the kernel before it on the stream ends
// (programmatic dependent launch): it must call begin_dependent() before it touches what any
// kernel before it reads or writes. `what` names it in errors.
template <class... Params, class... Args>
Status launch_dependent(void (*kernel)(Params...), dim3 blocks, int threads, size_t shared_bytes,
                        cudaStream_t stream, const char* what, const Args&... args) {
  LaunchOptions launch(blocks, threads, 1, {.capability = 90, .compiled = 90}, stream);
  launch.config.dynamicSmemBytes = shared_bytes;
  return cuda_status(cudaLaunchKernelEx(&launch.config, kernel, args...), what);
}

}  // namespace sqz::cuda::prefill
