#include "libruntime/cuda/backend.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/merge_states/kernel.h"

namespace sqz::cuda {
namespace {

Status check_gpu(int gpu) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  forget(error);
  if (error == cudaSuccess && gpu >= 0 && gpu < count) return {};
  const Status usable = check_probe(probe_device(gpu), gpu);
  if (usable.ok()) return {};
  return {usable.code(), concat("device_type 2 (CUDA): ", usable.message())};
}

}  // namespace

Status merge_states(int gpu, DType dtype, int64_t rows, int64_t dim, void* out_a,
                    const LseRows& lse_a, const void* out_b, const ConstLseRows& lse_b,
                    void* stream) {
  SQZ_RETURN_IF_ERROR(check_gpu(gpu));
  const CurrentDevice current(gpu);
  return launch_merge_states({.dtype = dtype,
                              .rows = rows,
                              .dim = dim,
                              .out_a = out_a,
                              .lse_a = lse_a,
                              .out_b = out_b,
                              .lse_b = lse_b},
                             static_cast<cudaStream_t>(stream));
}

Status clear_states(int gpu, DType dtype, int64_t rows, int64_t dim, void* out, const LseRows& lse,
                    void* stream) {
  SQZ_RETURN_IF_ERROR(check_gpu(gpu));
  const CurrentDevice current(gpu);
  return launch_clear_states({.dtype = dtype, .rows = rows, .dim = dim, .out_a = out, .lse_a = lse},
                             static_cast<cudaStream_t>(stream));
}

}  // namespace sqz::cuda
