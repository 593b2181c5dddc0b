#include "libindex/cuda/calibrate/kernels.h"

#include "libindex/score_bins.h"
#include "libruntime/kernels/cuda/common/launch_options.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;

// A block counts one list.
__global__ void __launch_bounds__(kThreads)
    record_kernel(const __grid_constant__ SelectRuns scored, unsigned long long* counts,
                  uint32_t* faults) {
  __shared__ uint32_t bins[kScoreBins];
  const int64_t list = blockIdx.x, head = list % scored.shape.kv_heads, n = scored.level.clusters;
  if (threadIdx.x == 0 && scored.chosen.totals[list].fault != 0) faults[head] = 1;
  for (int b = threadIdx.x; b < kScoreBins; b += kThreads) bins[b] = 0;
  __syncthreads();
  const bool all = scored.alive.totals == nullptr;
  const uint32_t count = all ? n : scored.alive.totals[list].keys;
  const uint32_t* sizes = all ? scored.level.sizes + head * n : scored.alive_sizes + list * n;
  const float* scores = scored.scores + list * scored.stride;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    if (sizes[i] == 0) continue;
    atomicAdd(&bins[score_bin(scores[i] * 0.6931471805599453)], sizes[i]);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < kScoreBins; b += kThreads) {
    if (bins[b] != 0) {
      atomicAdd(&counts[head * kScoreBins + b], static_cast<unsigned long long>(bins[b]));
    }
  }
}

}  // namespace

Status calibration_record(const SelectRuns& scored, unsigned long long* counts, uint32_t* faults,
                          cudaStream_t stream) {
  return launch_blocks(record_kernel, scored.blocks.count * scored.shape.kv_heads, kThreads, 0,
                       Device(), stream, scored, counts, faults);
}

}  // namespace sqz::cuda
