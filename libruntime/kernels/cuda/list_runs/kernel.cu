#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/list_runs/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;

// A block of threads a list.
__global__ void __launch_bounds__(kThreads)
    list_runs_kernel(RunLists from, PrefillRuns to, uint32_t* faults) {
  const int64_t list = blockIdx.x;
  const RunTotals totals = from.totals[list];
  const uint32_t* first = from.first + list * (from.capacity + 1);
  const uint32_t* before = from.before + list * (from.capacity + 1);
  for (uint32_t i = threadIdx.x; i < totals.runs; i += kThreads) {
    to.runs[list * to.stride + i] = make_uint2(first[i], before[i + 1] - before[i]);
    to.prefix[list * to.stride + i] = before[i];
  }
  if (threadIdx.x != 0) return;
  to.counts[list] = totals.runs;
  to.totals[list] = totals.keys;
  faults[list] = totals.fault;
}

}  // namespace

Status list_runs(const RunLists& from, int lists, const PrefillRuns& to, uint32_t* faults,
                 cudaStream_t stream) {
  list_runs_kernel<<<static_cast<unsigned>(lists), kThreads, 0, stream>>>(from, to, faults);
  return cuda_status(cudaGetLastError(), "run list kernel");
}

}  // namespace sqz::cuda
