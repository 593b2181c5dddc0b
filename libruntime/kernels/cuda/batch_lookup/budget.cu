#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/batch_lookup/emit.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"

namespace sqz::cuda {
namespace {

__global__ void __launch_bounds__(kBatchThreads)
    batch_budget_kernel(const __grid_constant__ BatchLookup call, int k) {
  __shared__ Sums shared[kBatchWarps];
  const LookupParams& p = call.lookup;
  const BatchList own(call, static_cast<int>(blockIdx.y));
  const BatchPlace at(p.level[k].clusters);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  uint32_t word = 0;
#pragma unroll 4
  for (int request = 0; at.has && request < own.requests; ++request) {
    const int64_t pair = static_cast<int64_t>(own.first + request) * p.kv_heads + own.head;
    if (call.pair_faults[pair] == 0 && call.scores[pair * p.width + at.cluster] > -INFINITY) {
      word |= 1u << request;
    }
  }
  pass_on(call, own, k, at, word, *own.faults(call, k), shared);
}

}  // namespace

Status launch_batch_budget(const BatchLookup& call, int level, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(call.choose_tiles(level)),
                    static_cast<unsigned>(call.lists()));
  return launch_blocks(batch_budget_kernel, blocks, kBatchThreads, 0, call.lookup.device, stream,
                       call, level);
}

}  // namespace sqz::cuda
