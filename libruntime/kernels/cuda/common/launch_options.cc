#include "libruntime/kernels/cuda/common/launch_options.h"

#include <atomic>

namespace sqz::cuda {

Status allow_all(const void* kernel, bool clusters) {
  // Kernels and GPUs that are done. A kernel without a place in the table is done again, which
  // changes nothing: it gets the same settings.
  constexpr size_t kPlaces = 2048, kTries = 16;
  static std::atomic<uint64_t> done[kPlaces] = {};
  int gpu = 0;
  SQZ_RETURN_IF_CUDA_ERROR(cudaGetDevice(&gpu));
  const uint64_t key = reinterpret_cast<uintptr_t>(kernel) << 8 | static_cast<uint64_t>(gpu);
  const size_t first = key * 0x9E3779B97F4A7C15u >> 40;
  for (size_t i = 0; i < kTries; ++i) {
    if (done[(first + i) % kPlaces].load(std::memory_order_acquire) == key) return {};
  }
  int most = 0;
  cudaFuncAttributes attributes;
  SQZ_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu));
  most -= static_cast<int>(attributes.sharedSizeBytes);
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  if (clusters) {  // of more than 8 blocks, which not every GPU has
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  for (size_t i = 0; i < kTries; ++i) {
    uint64_t none = 0;
    if (done[(first + i) % kPlaces].compare_exchange_strong(none, key)) break;
  }
  return {};
}

}  // namespace sqz::cuda
