// The kernels of one head dimension and their launches.
#pragma once

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.cuh"

namespace sqz::cuda {

template <class Element, int kDim, int kRows, bool kBudget, bool kOwn>
__global__ void __launch_bounds__(kLookupThreads, 1)
    decode_lookup_kernel(const __grid_constant__ LookupParams params, int team, int slice) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char lookup_memory[];
  Lookup<Element, kDim, kRows, kBudget, kOwn>(params, team, slice, lookup_memory).run();
#endif
}

// A lookup's kernel, and what a block of it has.
struct LookupLaunch {
  void (*kernel)(LookupParams, int, int);
  int slice;      // clusters of every level
  int64_t bytes;  // of shared memory
};

template <class Element, int kDim, int kRows, bool kBudget>
auto lookup_kernel(const LookupParams& params) {
  return params.own != nullptr ? decode_lookup_kernel<Element, kDim, kRows, kBudget, true>
                               : decode_lookup_kernel<Element, kDim, kRows, kBudget, false>;
}

template <int kDim, int kRows>
LookupLaunch lookup_rows(const LookupParams& params, int team) {
  const bool bf16 = params.dtype == DType::kBF16, budget = params.rule == LookupRule::kBudget;
  const auto kernel = budget ? bf16 ? lookup_kernel<Bf16, kDim, kRows, true>(params)
                                    : lookup_kernel<F16, kDim, kRows, true>(params)
                      : bf16 ? lookup_kernel<Bf16, kDim, kRows, false>(params)
                             : lookup_kernel<F16, kDim, kRows, false>(params);
  const int slice = static_cast<int>((params.width + team - 1) / team);
  return {kernel, slice, lookup_bytes<kDim, kRows>(team, slice, params.group, budget)};
}

template <int kDim>
LookupLaunch lookup_of(const LookupParams& params, int team) {
  return params.group > 8 ? lookup_rows<kDim, 16>(params, team)
                          : lookup_rows<kDim, 8>(params, team);
}

template <int kDim>
Status launch_lookup(const LookupParams& params, int team, cudaStream_t stream) {
  const LookupLaunch launch = lookup_of<kDim>(params, team);
  return launch_clusters(launch.kernel, params.requests * params.kv_heads * team, kLookupThreads,
                         team, launch.bytes, params.device, stream, params, team, launch.slice);
}

template <int kDim>
int lookup_teams_at_once(const LookupParams& params, int team) {
  const LookupLaunch launch = lookup_of<kDim>(params, team);
  if (launch.slice > kLookupThreads * kMostOfThread) return 0;
  if (launch.bytes > params.device.block_shared) return 0;
  return clusters_at_once(launch.kernel, kLookupThreads, team, launch.bytes, params.device);
}

}  // namespace sqz::cuda
