// The kernels of one head dimension and their launches.
#pragma once

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode_lookup/kernel.cuh"
#include "libruntime/kernels/cuda/decode_lookup/pushing.cuh"

namespace sqz::cuda {

template <class Element, int kDim, bool kPages>
__global__ void __launch_bounds__(kLookupThreads, 2)
    decode_lookup_kernel(const __grid_constant__ LookupParams params, int team, int room) {
  __shared__ LookupShared<kDim> shared;
  extern __shared__ __align__(16) float slice_memory[];
  Lookup<Element, kDim, kPages>(params, team, room, shared, slice_memory).run();
}

// Only launched on Hopper.
template <class Element, int kDim, LookupRule kRule>
__global__ void __launch_bounds__(kPushingThreads, 1)
    lookup_pushing_kernel(const __grid_constant__ LookupParams params, int team, int slice) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char pushing_memory[];
  PushingLookup<Element, kDim, kRule>(params, team, slice, pushing_memory).run();
#endif
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
auto pushing_kernel(const LookupParams& params) {
  constexpr auto kThreshold = LookupRule::kThreshold, kBudget = LookupRule::kBudget;
  if (params.dtype == DType::kBF16) {
    return params.rule == kBudget ? lookup_pushing_kernel<Bf16, kDim, kBudget>
                                  : lookup_pushing_kernel<Bf16, kDim, kThreshold>;
  }
  return params.rule == kBudget ? lookup_pushing_kernel<F16, kDim, kBudget>
                                : lookup_pushing_kernel<F16, kDim, kThreshold>;
}

// Words of a block's dynamic shared memory for a slice of every level; 0: it has no room for them.
template <int kDim>
int lookup_room(const LookupParams& params, int team) {
  const int64_t words = (params.width + team - 1) / team * (params.group + 2);
  const auto fixed = static_cast<int64_t>(sizeof(LookupShared<kDim>));
  return fixed + 4 * words <= params.device.block_shared ? static_cast<int>(words) : 0;
}

template <int kDim>
Status launch_lookup(const LookupParams& params, int team, cudaStream_t stream) {
  const int blocks = params.requests * params.kv_heads * team;
  const int64_t slice = (params.width + team - 1) / team;
  const int64_t pushing =
      pushing_bytes<kDim>(params.rule, team, static_cast<int>(slice), params.group);
  if (is_pushing(params) && team > 1 && slice <= kPushingThreads * kMostOfThread &&
      pushing <= params.device.block_shared) {
    LaunchOptions launch(blocks, kPushingThreads, team, params.device, stream);
    return launch_team(pushing_kernel<kDim>(params), launch, pushing, params, team,
                       static_cast<int>(slice));
  }
  LaunchOptions launch(blocks, kLookupThreads, team, params.device, stream);
  const int room = lookup_room<kDim>(params, team);
  return launch_team(lookup_kernel<kDim>(params), launch, int64_t{room} * 4, params, team, room);
}

template <int kDim>
int lookup_teams_at_once(const LookupParams& params, int team) {
  if (is_pushing(params)) {
    return teams_of(pushing_kernel<kDim>(params), kPushingThreads, team,
                    pushing_bytes<kDim>(params.rule, team, 0, 0), params.device);
  }
  return teams_of(lookup_kernel<kDim>(params), kLookupThreads, team,
                  int64_t{lookup_room<kDim>(params, team)} * 4, params.device);
}

}  // namespace sqz::cuda
