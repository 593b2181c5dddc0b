#include "libruntime/kernels/cuda/prefill_common/block_table.h"

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

__global__ void table_kernel(const __grid_constant__ TablePart part, int2* to) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < part.count) to[i] = part.blocks[i];
}

}  // namespace

Status write_table(const TablePart& part, int2* to, cudaStream_t stream) {
  table_kernel<<<1, kTablePart, 0, stream>>>(part, to);
  return cuda_status(cudaGetLastError(), "prefill block table kernel");
}

}  // namespace sqz::cuda
