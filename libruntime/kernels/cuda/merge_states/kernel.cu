// A warp a row.
#include <algorithm>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/merge_states/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMostGrid = 65536;

__global__ void __launch_bounds__(kThreads)
    merge_states_kernel(const __grid_constant__ MergeStatesParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  for (; row < p.rows; row += warps) {
    const float a = p.lse_a[row], b = p.lse_b[row];
    __syncwarp();
    const bool sound = a < INFINITY && b < INFINITY;
    if (sound && b == -INFINITY) continue;
    const float top = fmaxf(a, b);
    const float weight_a = expf(a - top), weight_b = expf(b - top), sum = weight_a + weight_b;
    for (int64_t c = lane; c < p.dim; c += 32) {
      const int64_t at = row * p.dim + c;
      // An empty side may hold anything: its 0 * NaN must not count.
      const float from_a = weight_a == 0 ? 0 : weight_a * load_1(p.dtype, p.out_a, at);
      const float value = (from_a + weight_b * load_1(p.dtype, p.out_b, at)) / sum;
      store_1(p.dtype, p.out_a, at, sound ? value : NAN);
    }
    if (lane == 0) p.lse_a[row] = sound ? top + logf(sum) : NAN;
  }
}

__global__ void __launch_bounds__(kThreads)
    clear_states_kernel(const __grid_constant__ MergeStatesParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  for (; row < p.rows; row += warps) {
    for (int64_t c = lane; c < p.dim; c += 32) store_1(p.dtype, p.out_a, row * p.dim + c, 0);
    if (lane == 0) p.lse_a[row] = -INFINITY;
  }
}

Status launch(void (*kernel)(MergeStatesParams), const MergeStatesParams& params,
              cudaStream_t stream) {
  if (params.rows == 0) return {};
  const int64_t blocks = (params.rows + kThreads / 32 - 1) / (kThreads / 32);
  kernel<<<static_cast<unsigned>(std::min(blocks, kMostGrid)), kThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "merge kernel");
}

}  // namespace

Status launch_merge_states(const MergeStatesParams& params, cudaStream_t stream) {
  return launch(merge_states_kernel, params, stream);
}

Status launch_clear_states(const MergeStatesParams& params, cudaStream_t stream) {
  return launch(clear_states_kernel, params, stream);
}

}  // namespace sqz::cuda
