// Merges states of the same queries over disjoint keys, as merge_rows() does on the CPU, and makes
// the state of no keys (libruntime/cuda/backend.h). A warp a row.
#include <algorithm>

#include "libruntime/cuda/backend.h"
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMostGrid = 65536;

// b into a, in place. A row whose lse is NaN or +infinity in one of them becomes NaN: nothing waits
// for the GPU to say so.
struct MergeStatesParams {
  DType dtype = DType::kF32;  // of out: F32, F16 or BF16
  int64_t rows = 0, dim = 0;
  void* out_a = nullptr;  // [rows, dim]
  LseRows lse_a;          // natural
  const void* out_b = nullptr;
  ConstLseRows lse_b;
  Sinks sinks;  // added once, behind b
};

__global__ void __launch_bounds__(kThreads)
    merge_states_kernel(const __grid_constant__ MergeStatesParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  for (; row < p.rows; row += warps) {
    const float a = p.lse_a[row], b = p.lse_b[row];
    const bool has_sink = p.sinks.data != nullptr;
    const float sink = has_sink ? p.sinks.data[row % p.sinks.heads] : -INFINITY;
    __syncwarp();
    const bool sound = a < INFINITY && b < INFINITY && sink < INFINITY;
    if (sound && b == -INFINITY && sink == -INFINITY) continue;
    const float top = fmaxf(fmaxf(a, b), sink);
    const float weight_a = expf(a - top), weight_b = expf(b - top);
    const float sum = weight_a + weight_b + expf(sink - top);
    for (int64_t c = lane; c < p.dim; c += 32) {
      const int64_t at = row * p.dim + c;
      // An empty side may hold anything: its 0 * NaN must not count.
      const float from_a = weight_a == 0 ? 0 : weight_a * load_1(p.dtype, p.out_a, at);
      const float from_b = weight_b == 0 ? 0 : weight_b * load_1(p.dtype, p.out_b, at);
      const float value = (from_a + from_b) / sum;
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

Status check_gpu(int gpu) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  forget(error);
  if (error == cudaSuccess && gpu >= 0 && gpu < count) return {};
  const Status usable = check_probe(probe_device(gpu), gpu);
  if (usable.ok()) return {};
  return {usable.code(), concat("device_type 2 (CUDA): ", usable.message())};
}

Status launch(void (*kernel)(MergeStatesParams), int gpu, const MergeStatesParams& params,
              void* stream) {
  SQZ_RETURN_IF_ERROR(check_gpu(gpu));
  if (params.rows == 0) return {};
  const CurrentDevice current(gpu);
  const int64_t blocks = (params.rows + kThreads / 32 - 1) / (kThreads / 32);
  return launch_blocks(kernel, static_cast<unsigned>(std::min(blocks, kMostGrid)), kThreads, 0,
                       Device(), static_cast<cudaStream_t>(stream), params);
}

}  // namespace

Status merge_states(int gpu, DType dtype, int64_t rows, int64_t dim, void* out_a,
                    const LseRows& lse_a, const void* out_b, const ConstLseRows& lse_b,
                    const Sinks& sinks, void* stream) {
  return launch(merge_states_kernel, gpu, {dtype, rows, dim, out_a, lse_a, out_b, lse_b, sinks},
                stream);
}

Status clear_states(int gpu, DType dtype, int64_t rows, int64_t dim, void* out, const LseRows& lse,
                    void* stream) {
  return launch(clear_states_kernel, gpu, {dtype, rows, dim, out, lse, nullptr, {}, {}}, stream);
}

}  // namespace sqz::cuda
