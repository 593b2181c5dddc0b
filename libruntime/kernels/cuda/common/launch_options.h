// How kernels are launched: in clusters, and before the kernel in front of them has ended.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"

namespace sqz::cuda {

// What a launch needs beside the parameters. Blocks work in teams of `team`. Where there are
// clusters, these are the teams, and blocks may begin while the kernel before them on the stream
// ends (programmatic dependent launch): it is theirs to wait for it. Elsewhere blocks of a team
// wait for each other, so all blocks must run at once (a cooperative launch). Not to be copied:
// `config` points into it.
struct LaunchOptions {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};

  LaunchOptions(const LaunchOptions&) = delete;
  LaunchOptions& operator=(const LaunchOptions&) = delete;

  LaunchOptions(dim3 blocks, int threads, int team, const Device& device, cudaStream_t stream) {
    config.gridDim = blocks;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    config.attrs = attributes;
    if (team > 1) {
      cudaLaunchAttribute& together = attributes[config.numAttrs++];
      if (device.has_clusters()) {
        together.id = cudaLaunchAttributeClusterDimension;
        together.val.clusterDim = {static_cast<unsigned>(team), 1, 1};
      } else {
        together.id = cudaLaunchAttributeCooperative;
        together.val.cooperative = 1;
      }
    }
    if (device.has_clusters()) {
      cudaLaunchAttribute& begin = attributes[config.numAttrs++];
      begin.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      begin.val.programmaticStreamSerializationAllowed = 1;
    }
  }
};

// Launches `kernel` as `launch` says, with so many bytes of dynamic shared memory.
template <class Kernel, class... Args>
Status launch_team(Kernel kernel, LaunchOptions& launch, int64_t shared_bytes,
                   const Args&... args) {
  launch.config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  if (shared_bytes > 0) {
    SQZ_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  }
  const cudaLaunchAttribute& first = launch.attributes[0];
  if (launch.config.numAttrs > 0 && first.id == cudaLaunchAttributeClusterDimension &&
      first.val.clusterDim.x > 8) {  // larger clusters are not on every GPU
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  SQZ_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&launch.config, kernel, args...));
  return {};
}

// Launches `kernel` in single blocks. On a device with programmatic launches it must wait for the
// kernels before it (griddepcontrol_wait()) before it touches what they read or write; without a
// device it begins when they have ended.
template <class Kernel, class... Args>
Status launch_blocks(Kernel kernel, dim3 blocks, int threads, int64_t shared_bytes,
                     const Device& device, cudaStream_t stream, const Args&... args) {
  LaunchOptions launch(blocks, threads, 1, device, stream);
  return launch_team(kernel, launch, shared_bytes, args...);
}

// Teams that the GPU holds at once; 0 if it cannot gather one.
template <class Kernel>
int teams_of(Kernel kernel, int threads, int team, int64_t shared_bytes, const Device& device) {
  LaunchOptions launch(team, threads, team, device, nullptr);
  launch.config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  int count = 0;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes));
  if (error == cudaSuccess && device.has_clusters()) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config);
    }
  } else if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads,
                                                          launch.config.dynamicSmemBytes);
    count = std::min(count * device.multiprocessors / team, device.multiprocessors);
  }
  if (error == cudaSuccess) return count;
  forget(error);
  return 0;
}

}  // namespace sqz::cuda
