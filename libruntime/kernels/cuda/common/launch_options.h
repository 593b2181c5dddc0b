// How kernels are launched: in clusters, and before the kernel in front of them has ended.
#pragma once

#include <cuda_runtime.h>

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {

// What a launch needs beside the parameters. Blocks work in teams, clusters of `team`; with `early`
// they may begin while the kernel before them on the stream ends (programmatic dependent launch,
// compute capability 9.0): it is theirs to wait for it. Not to be copied: `config` points into it.
struct LaunchOptions {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};

  LaunchOptions(const LaunchOptions&) = delete;
  LaunchOptions& operator=(const LaunchOptions&) = delete;

  LaunchOptions(dim3 blocks, int threads, int team, bool early, cudaStream_t stream) {
    config.gridDim = blocks;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    config.attrs = attributes;
    if (team > 1) {
      cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(team), 1, 1};
    }
    if (early) {
      cudaLaunchAttribute& begin = attributes[config.numAttrs++];
      begin.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      begin.val.programmaticStreamSerializationAllowed = 1;
    }
  }
};

// Launches `kernel` as `launch` says, in teams of `team`.
template <class Kernel, class... Args>
Status launch_team(Kernel kernel, LaunchOptions& launch, int team, int64_t shared_bytes,
                   const Args&... args) {
  launch.config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  SQZ_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(shared_bytes)));
  if (team > 8) {  // larger clusters are not on every GPU
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  SQZ_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&launch.config, kernel, args...));
  return {};
}

// Teams that the GPU holds at once; 0 if it cannot gather one.
template <class Kernel>
int teams_of(Kernel kernel, int threads, int team, size_t shared_bytes) {
  LaunchOptions launch(team, threads, team, true, nullptr);
  launch.config.dynamicSmemBytes = shared_bytes;
  int count = 0;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
          cudaSuccess ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes)) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

}  // namespace sqz::cuda
