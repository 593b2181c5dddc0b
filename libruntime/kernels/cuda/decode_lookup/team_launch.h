// Launches of kernels whose blocks work in teams.
#pragma once

#include <cuda_runtime_api.h>

namespace sqz::cuda {

// What a launch needs beside the parameters.
struct TeamLaunch {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};

  TeamLaunch(int blocks, int threads, int team, bool hopper, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    config.attrs = attributes;
    if (team > 1) {
      cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(team), 1, 1};
    }
    if (hopper) {
      cudaLaunchAttribute& early = attributes[config.numAttrs++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
  }
};

// Teams that the GPU holds at once; 0 if it cannot gather one.
template <class Kernel>
int teams_of(Kernel kernel, int threads, int team, size_t shared_bytes) {
  TeamLaunch launch(team, threads, team, true, nullptr);
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
