// The kernels of one head dimension and their launches.
#pragma once

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode_codes/kernel.cuh"

namespace sqz::cuda {

template <class Element, int kDim, int kRows>
__global__ void __launch_bounds__(kCodedThreads, 1)
    decode_codes_kernel(const __grid_constant__ CodedParams params, int team, int room) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<CodedShared<kDim>*>(memory);
  auto* rest = reinterpret_cast<uint32_t*>(memory + sizeof(CodedShared<kDim>));
  DecodeCodes<Element, kDim, kRows>(params, team, shared, rest, room).run();
}

template <int kDim>
auto codes_kernel(const CodedParams& params) {
  const auto kernel = [&](auto element) {
    using Element = decltype(element);
    return params.lookup.group <= 4 ? decode_codes_kernel<Element, kDim, 4>
                                    : decode_codes_kernel<Element, kDim, kMostGroup>;
  };
  return params.lookup.dtype == DType::kBF16 ? kernel(Bf16()) : kernel(F16());
}

// Teams exchange words in global memory even where there are clusters: these take whole groups of
// multiprocessors, and an H200 that holds eight teams of 16 blocks has room for seven such
// clusters.
inline Device without_clusters(Device device) {
  device.compiled = std::min(device.compiled, 89);
  return device;
}

template <int kDim>
Status launch_codes(const CodedParams& params, int team, cudaStream_t stream) {
  const LookupParams& p = params.lookup;
  const Device device = team > 1 ? without_clusters(p.device) : p.device;
  LaunchOptions launch(p.requests * p.kv_heads * team, kCodedThreads, team, device, stream);
  const auto fixed = static_cast<int>(sizeof(CodedShared<kDim>));
  const int room = (p.device.block_shared - fixed) / 16 * 4;
  return launch_team(codes_kernel<kDim>(params), launch, fixed + 4 * int64_t{room}, params, team,
                     room);
}

template <int kDim>
int codes_teams_at_once(const CodedParams& params, int team) {
  return teams_of(codes_kernel<kDim>(params), kCodedThreads, team,
                  params.lookup.device.block_shared, without_clusters(params.lookup.device));
}

}  // namespace sqz::cuda
