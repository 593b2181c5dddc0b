#include "libruntime/kernels/cuda/add_counters/kernel.h"
#include "libruntime/kernels/cuda/common/launch_options.h"

namespace sqz::cuda {
namespace {

__global__ void add_counters_kernel(unsigned long long* counters, unsigned long long selections,
                                    unsigned long long keys, unsigned long long vectors) {
  atomicAdd(&counters[0], selections);
  atomicAdd(&counters[1], keys);
  atomicAdd(&counters[2], vectors);
}

}  // namespace

Status add_counters(unsigned long long* counters, unsigned long long selections,
                    unsigned long long keys, unsigned long long vectors, cudaStream_t stream) {
  return launch_blocks(add_counters_kernel, 1, 1, 0, Device(), stream, counters, selections, keys,
                       vectors);
}

}  // namespace sqz::cuda
