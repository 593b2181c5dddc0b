// Kernels of a prompt, one after the other: the device's side and the host's.
#pragma once

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"

namespace sqz::cuda::prefill {

// Waits for the end of the kernels before this one, then lets the next one begin: it may have read
// by then what they wrote. All threads of a block.
__device__ __forceinline__ void begin_dependent() {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
}

inline constexpr Device kHopper = {.capability = 90, .compiled = 90};

// Launches `kernel`, which calls begin_dependent() first.
template <class Kernel, class... Args>
Status launch_dependent(Kernel kernel, dim3 blocks, int threads, int64_t shared_bytes,
                        cudaStream_t stream, const Args&... args) {
  return launch_blocks(kernel, blocks, threads, shared_bytes, kHopper, stream, args...);
}

}  // namespace sqz::cuda::prefill
