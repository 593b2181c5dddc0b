// The rule kBudget, once a level's cutoffs are known.
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/batch/lookup/list.cuh"
#include "libruntime/kernels/cuda/common/dependent.cuh"

namespace sqz::cuda {
namespace {

class BatchChosen : private BatchList {
 public:
  __device__ BatchChosen(const BatchLookup& call, int level, Shared& shared)
      : BatchList(call, level, shared, kChosenOnEach) {}

  __device__ void run() {
    begin_dependent();
    if (is_whole()) return list_all();
    if (!looks_up()) return;
    take_ticket();
    const uint32_t faults = faults_before();
    const int64_t stride = call_.score_stride() / 32;
    uint32_t* words = chosen_words(0);
#pragma unroll 1
    for (int cluster = begin_ + thread_; cluster < end_; cluster += kBatchThreads) {
      uint32_t word = 0;
#pragma unroll 8
      for (int r = 0; r < requests_; ++r) {
        word |= (call_.chosen[pair_of(r) * stride + cluster / 32] >> cluster % 32 & 1) << r;
      }
      words[cluster] = word & ~faults;
    }
    pass_on(1, faults);
  }
};

__global__ void __launch_bounds__(kBatchThreads)
    batch_chosen_kernel(const __grid_constant__ BatchLookup call, int level) {
  __shared__ BatchList::Shared shared;
  BatchChosen(call, level, shared).run();
}

}  // namespace

Status launch_batch_chosen(const BatchLookup& call, int level, cudaStream_t stream) {
  return launch_blocks(batch_chosen_kernel, call.launched(level, kChosenOnEach), kBatchThreads, 0,
                       call.lookup.device, stream, call, level);
}

}  // namespace sqz::cuda
