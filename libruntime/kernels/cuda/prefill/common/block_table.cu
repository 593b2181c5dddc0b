#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/prefill/common/block_table.h"

namespace sqz::cuda {
namespace {

__global__ void table_kernel(const __grid_constant__ TablePart part, int2* to) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < part.count) to[i] = part.blocks[i];
}

}  // namespace

Status write_table(const TablePart& part, int2* to, cudaStream_t stream) {
  return launch_blocks(table_kernel, 1, kTablePart, 0, Device(), stream, part, to);
}

}  // namespace sqz::cuda
