// How kernels are launched: in clusters, and before the kernel in front of them has ended.
#pragma once

#include <cuda_runtime.h>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"

namespace sqz::cuda {

// Lets `kernel` have all shared memory of a block of the current GPU, and clusters of any size if
// it runs in `clusters`. These settings belong to the kernel, whichever thread launches it, so they
// are set once to the most that there is, and not to what a launch needs.
Status allow_all(const void* kernel, bool clusters);

// The options of a launch beside its parameters. Where there are clusters, blocks work in clusters
// of `cluster`, and may begin while the kernel before them on the stream ends (programmatic
// dependent launch): it is theirs to wait for it. Not to be copied: `config` points into it.
struct LaunchOptions {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};

  LaunchOptions(const LaunchOptions&) = delete;
  LaunchOptions& operator=(const LaunchOptions&) = delete;

  LaunchOptions(dim3 blocks, int threads, int cluster, int64_t shared_bytes, const Device& device,
                cudaStream_t stream) {
    config.gridDim = blocks;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    if (!device.has_clusters()) return;
    cudaLaunchAttribute& begin = attributes[config.numAttrs++];
    begin.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    begin.val.programmaticStreamSerializationAllowed = 1;
    if (cluster == 1) return;
    cudaLaunchAttribute& together = attributes[config.numAttrs++];
    together.id = cudaLaunchAttributeClusterDimension;
    together.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
};

// Launches `kernel` in clusters of blocks, with so many bytes of dynamic shared memory.
template <class Kernel, class... Args>
Status launch_clusters(Kernel kernel, dim3 blocks, int threads, int cluster, int64_t shared_bytes,
                       const Device& device, cudaStream_t stream, const Args&... args) {
  constexpr int64_t kAlways = int64_t{48} << 10;  // that every kernel may have
  const LaunchOptions launch(blocks, threads, cluster, shared_bytes, device, stream);
  if (shared_bytes > kAlways || cluster > 1) {
    SQZ_RETURN_IF_ERROR(allow_all(reinterpret_cast<const void*>(kernel), cluster > 1));
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
  return launch_clusters(kernel, blocks, threads, 1, shared_bytes, device, stream, args...);
}

// Clusters of that size that the GPU holds at once; 0 if it cannot gather one.
template <class Kernel>
int clusters_at_once(Kernel kernel, int threads, int cluster, int64_t shared_bytes,
                     const Device& device) {
  const LaunchOptions launch(cluster, threads, cluster, shared_bytes, device, nullptr);
  int count = 0;
  if (!allow_all(reinterpret_cast<const void*>(kernel), true).ok()) return 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config);
  if (error == cudaSuccess) return count;
  forget(error);
  return 0;
}

}  // namespace sqz::cuda
