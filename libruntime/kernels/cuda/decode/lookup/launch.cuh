// The kernels of one head dimension and their launches.
#pragma once

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.cuh"

namespace sqz::cuda {

template <class Element, int kDim, bool kBudget>
__global__ void __launch_bounds__(kLookupThreads, 1)
    decode_lookup_kernel(const __grid_constant__ LookupParams params, int team, int slice) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char lookup_memory[];
  Lookup<Element, kDim, kBudget>(params, team, slice, lookup_memory).run();
#endif
}

template <int kDim>
auto lookup_kernel(const LookupParams& params) {
  const bool bf16 = params.dtype == DType::kBF16;
  return params.rule == LookupRule::kBudget
             ? bf16 ? decode_lookup_kernel<Bf16, kDim, true> : decode_lookup_kernel<F16, kDim, true>
         : bf16 ? decode_lookup_kernel<Bf16, kDim, false>
                : decode_lookup_kernel<F16, kDim, false>;
}

// Clusters of a block of every level.
inline int slice_of(const LookupParams& params, int team) {
  return static_cast<int>((params.width + team - 1) / team);
}
template <int kDim>
int64_t bytes_of(const LookupParams& params, int team) {
  return lookup_bytes<kDim>(team, slice_of(params, team), params.group,
                            params.rule == LookupRule::kBudget);
}

template <int kDim>
Status launch_lookup(const LookupParams& params, int team, cudaStream_t stream) {
  return launch_clusters(lookup_kernel<kDim>(params), params.requests * params.kv_heads * team,
                         kLookupThreads, team, bytes_of<kDim>(params, team), params.device, stream,
                         params, team, slice_of(params, team));
}

template <int kDim>
int lookup_teams_at_once(const LookupParams& params, int team) {
  const int64_t bytes = bytes_of<kDim>(params, team);
  const int slice = slice_of(params, team);
  if (slice > kLookupThreads * kMostOfThread || bytes > params.device.block_shared) return 0;
  return clusters_at_once(lookup_kernel<kDim>(params), kLookupThreads, team, bytes, params.device);
}

}  // namespace sqz::cuda
