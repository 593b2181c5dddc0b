#include "libruntime/cuda/backend.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/merge_states/kernel.h"

namespace sqz::cuda {

Status merge_states(int gpu, DType dtype, int64_t rows, int64_t dim, void* out_a, float* lse_a,
                    const void* out_b, const float* lse_b, void* stream) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || gpu < 0 || gpu >= count) {
    const Status usable = check_probe(probe_device(gpu), gpu);
    return {usable.code(), concat("device_type 2 (CUDA): ", usable.message())};
  }
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

}  // namespace sqz::cuda
