// The kernels of one head dimension and their launches.
#pragma once

#include <type_traits>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.cuh"

namespace sqz::cuda {

template <class Element, int kDim, LookupKind kKind>
__global__ void __launch_bounds__(kLookupThreads, 1)
    decode_lookup_kernel(const __grid_constant__ LookupParams params, int team, int slice) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kRuns = true;
#else
  constexpr bool kRuns = !pushes(kKind);
#endif
  if constexpr (kRuns) {
    extern __shared__ __align__(16) char lookup_memory[];
    Lookup<Element, kDim, kKind>(params, team, slice, lookup_memory).run();
  }
}

// What serves a call, where shared memory has room for it.
inline LookupKind kind_of(const LookupParams& params) {
  if (params.pages) return LookupKind::kPages;
  if (!params.device.has_clusters()) return LookupKind::kAny;
  return params.rule == LookupRule::kBudget ? LookupKind::kBudget : LookupKind::kThreshold;
}

// body(the kind as a type).
template <class Body>
auto for_kind(LookupKind kind, const Body& body) {
  switch (kind) {
    case LookupKind::kThreshold:
      return body(std::integral_constant<LookupKind, LookupKind::kThreshold>());
    case LookupKind::kBudget:
      return body(std::integral_constant<LookupKind, LookupKind::kBudget>());
    case LookupKind::kPages:
      return body(std::integral_constant<LookupKind, LookupKind::kPages>());
    case LookupKind::kAny:
      break;
  }
  return body(std::integral_constant<LookupKind, LookupKind::kAny>());
}

template <int kDim, LookupKind kKind>
auto lookup_kernel(DType dtype) {
  return dtype == DType::kBF16 ? decode_lookup_kernel<Bf16, kDim, kKind>
                               : decode_lookup_kernel<F16, kDim, kKind>;
}

// Clusters of a slice of every level, if a block's shared memory has room for them; else 0.
template <int kDim, LookupKind kKind>
int slice_of(const LookupParams& params, int team) {
  const auto slice = static_cast<int>((params.width + team - 1) / team);
  const bool has_room =
      lookup_bytes<kDim, kKind>(team, slice, params.group) <= params.device.block_shared;
  return has_room ? slice : 0;
}

template <int kDim, LookupKind kKind>
Status launch_kind(const LookupParams& params, int team, cudaStream_t stream) {
  const int slice = slice_of<kDim, kKind>(params, team);
  if constexpr (pushes(kKind)) {
    if (team == 1 || slice == 0 || slice > kLookupThreads * kMostOfThread) {
      return launch_kind<kDim, LookupKind::kAny>(params, team, stream);
    }
  }
  const int blocks = params.requests * params.kv_heads * team;
  LaunchOptions launch(blocks, kLookupThreads, team, params.device, stream);
  return launch_team(lookup_kernel<kDim, kKind>(params.dtype), launch,
                     lookup_bytes<kDim, kKind>(team, slice, params.group), params, team, slice);
}

template <int kDim>
Status launch_lookup(const LookupParams& params, int team, cudaStream_t stream) {
  return for_kind(kind_of(params),
                  [&](auto kind) { return launch_kind<kDim, kind.value>(params, team, stream); });
}

template <int kDim>
int lookup_teams_at_once(const LookupParams& params, int team) {
  return for_kind(kind_of(params), [&](auto kind) {
    // Those that push are counted without their slices.
    const int slice = pushes(kind.value) ? 0 : slice_of<kDim, kind.value>(params, team);
    return teams_of(lookup_kernel<kDim, kind.value>(params.dtype), kLookupThreads, team,
                    lookup_bytes<kDim, kind.value>(team, slice, params.group), params.device);
  });
}

}  // namespace sqz::cuda
