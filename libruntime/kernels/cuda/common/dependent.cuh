// Most kernels that launch_blocks() launches begin with this.
#pragma once

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"

namespace sqz::cuda {

// Waits for the end of the kernels before this one, then lets the next one begin: it may have read
// by then what they wrote. All threads of a block.
__device__ __forceinline__ void begin_dependent() {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
}

}  // namespace sqz::cuda
