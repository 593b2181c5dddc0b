// The kernels of one head dimension and their launches.
#pragma once

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/decode_lookup/kernel.cuh"

namespace sqz::cuda {

template <class Element, int kDim, bool kPages>
__global__ void __launch_bounds__(kLookupThreads, 2)
    decode_lookup_kernel(const __grid_constant__ LookupParams params, int team, int room) {
  __shared__ LookupShared<kDim> shared;
  extern __shared__ float slice_logits[];
  Lookup<Element, kDim, kPages>(params, team, room, shared, slice_logits).run();
}

template <int kDim>
auto lookup_kernel(const LookupParams& params) {
  if (params.dtype == DType::kBF16) {
    return params.pages ? decode_lookup_kernel<Bf16, kDim, true>
                        : decode_lookup_kernel<Bf16, kDim, false>;
  }
  return params.pages ? decode_lookup_kernel<F16, kDim, true>
                      : decode_lookup_kernel<F16, kDim, false>;
}

// What a launch needs beside the parameters.
struct LookupLaunch {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};

  LookupLaunch(int blocks, int team, bool hopper, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(kLookupThreads);
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

template <int kDim>
Status launch_lookup(const LookupParams& params, int team, bool hopper, cudaStream_t stream) {
  LookupLaunch launch(params.requests * params.kv_heads * team, team, hopper, stream);
  const auto kernel = lookup_kernel<kDim>(params);
  const int64_t slice = (params.width + team - 1) / team * params.group;
  const int room = slice <= kMostRoom ? static_cast<int>(slice) : 0;
  launch.config.dynamicSmemBytes = static_cast<size_t>(room) * sizeof(float);
  SQZ_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                kMostRoom * int{sizeof(float)}));
  if (team > 8) {
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  SQZ_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&launch.config, kernel, params, team, room));
  return {};
}

// Teams of this many blocks that the GPU holds at once; 0 if it cannot gather one.
template <int kDim>
int lookup_teams_at_once(const LookupParams& params, int team) {
  const LookupLaunch launch(team, team, true, nullptr);
  const auto kernel = lookup_kernel<kDim>(params);
  int count = 0;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
          cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

}  // namespace sqz::cuda
