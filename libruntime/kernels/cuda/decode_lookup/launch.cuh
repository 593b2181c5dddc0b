// The kernels of one head dimension and their launches.
#pragma once

#include <algorithm>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/decode_lookup/kernel.cuh"
#include "libruntime/kernels/cuda/decode_lookup/team_launch.h"
#include "libruntime/kernels/cuda/decode_lookup/together.cuh"

namespace sqz::cuda {

template <class Element, int kDim, bool kPages>
__global__ void __launch_bounds__(kLookupThreads, 2)
    decode_lookup_kernel(const __grid_constant__ LookupParams params, int team, int room) {
  __shared__ LookupShared<kDim> shared;
  extern __shared__ __align__(16) float slice_memory[];
  Lookup<Element, kDim, kPages>(params, team, room, shared, slice_memory).run();
}

template <class Element, int kDim>
__global__ void __launch_bounds__(kTogetherThreads, 1)
    lookup_together_kernel(const __grid_constant__ LookupParams params, int team, int together,
                           int slice) {
  extern __shared__ __align__(16) char memory[];
  LookupTogether<Element, kDim>(params, team, together, slice, memory).run();
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

template <int kDim>
Status launch_lookup(const LookupParams& params, int team, bool hopper, cudaStream_t stream) {
  TeamLaunch launch(params.requests * params.kv_heads * team, kLookupThreads, team, hopper, stream);
  const auto kernel = lookup_kernel<kDim>(params);
  const int64_t words = (params.width + team - 1) / team * (params.group + 2);
  const int room = words <= kMostRoom ? static_cast<int>(words) : 0;
  launch.config.dynamicSmemBytes = static_cast<size_t>(room) * sizeof(float);
  SQZ_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(launch.config.dynamicSmemBytes)));
  if (team > 8) {
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  SQZ_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&launch.config, kernel, params, team, room));
  return {};
}

template <int kDim>
int lookup_teams_at_once(const LookupParams& params, int team) {
  return teams_of(lookup_kernel<kDim>(params), kLookupThreads, team, 0);
}

// Of at most `most` requests, as many as a block has shared memory for: 0 if not even two.
template <int kDim>
int lookup_together_at_once(const LookupParams& params, int team, int most) {
  const int64_t slice = (params.width + team - 1) / team;
  int together = std::min({most, 32, kTogetherRows / params.group});
  while (together >= 2 && together_bytes<kDim>(slice, together * params.group) > kTogetherMemory) {
    --together;
  }
  return together >= 2 ? together : 0;
}

template <int kDim>
int lookup_together_teams_at_once(const LookupParams& params, int team, int together) {
  const int64_t slice = (params.width + team - 1) / team;
  const auto kernel = params.dtype == DType::kBF16 ? lookup_together_kernel<Bf16, kDim>
                                                   : lookup_together_kernel<F16, kDim>;
  return teams_of(kernel, kTogetherThreads, team,
                  static_cast<size_t>(together_bytes<kDim>(slice, together * params.group)));
}

template <int kDim>
Status launch_lookup_together(const LookupParams& params, int team, int together,
                              cudaStream_t stream) {
  const auto kernel = params.dtype == DType::kBF16 ? lookup_together_kernel<Bf16, kDim>
                                                   : lookup_together_kernel<F16, kDim>;
  const int groups = (params.requests + together - 1) / together;
  TeamLaunch launch(groups * params.kv_heads * team, kTogetherThreads, team, params.hopper, stream);
  const int64_t slice = (params.width + team - 1) / team;
  launch.config.dynamicSmemBytes =
      static_cast<size_t>(together_bytes<kDim>(slice, together * params.group));
  SQZ_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(launch.config.dynamicSmemBytes)));
  if (team > 8) {
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaLaunchKernelEx(&launch.config, kernel, params, team, together, static_cast<int>(slice)));
  return {};
}

}  // namespace sqz::cuda
