// The kernels of one head dimension and their launches.
#pragma once

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/decode_classify/kernel.cuh"
#include "libruntime/kernels/cuda/decode_lookup/team_launch.h"

namespace sqz::cuda {

template <int kDim, int kRing>
__global__ void __launch_bounds__(kLookupThreads, 1)
    decode_classify_kernel(const __grid_constant__ ClassifyParams params, int team) {
  extern __shared__ __align__(16) char memory[];
  Classify<kDim, kRing>(params, team, memory).run();
}

template <int kDim>
auto classify_kernel(int ring) {
  return ring == kLongRing ? decode_classify_kernel<kDim, kLongRing>
                           : decode_classify_kernel<kDim, kShortRing>;
}

template <int kDim>
int64_t classify_bytes(const ClassifyParams& params, int team, int ring) {
  const LookupParams& lookup = params.lookup;
  return static_cast<int64_t>(sizeof(ClassifyShared<kDim>)) +
         ClassifyLayout(params.hidden, lookup.level[0].clusters, lookup.group, team, ring).bytes;
}

template <int kDim>
int classify_teams_at_once(const ClassifyParams& params, int team, int ring) {
  return teams_of(classify_kernel<kDim>(ring), kLookupThreads, team,
                  static_cast<size_t>(classify_bytes<kDim>(params, team, ring)));
}

template <int kDim>
Status launch_classify(const ClassifyParams& params, int team, int ring, cudaStream_t stream) {
  const LookupParams& lookup = params.lookup;
  TeamLaunch launch(lookup.requests * lookup.kv_heads * team, kLookupThreads, team, lookup.hopper,
                    stream);
  const auto kernel = classify_kernel<kDim>(ring);
  launch.config.dynamicSmemBytes = static_cast<size_t>(classify_bytes<kDim>(params, team, ring));
  SQZ_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(launch.config.dynamicSmemBytes)));
  if (team > 8) {
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  SQZ_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&launch.config, kernel, params, team));
  return {};
}

}  // namespace sqz::cuda
