// The kernels of one head dimension and their launches.
#pragma once

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode/classify/kernel.cuh"

namespace sqz::cuda {

template <int kDim, int kRing>
__global__ void __launch_bounds__(kClassifyThreads, 1)
    decode_classify_kernel(const __grid_constant__ ClassifyParams params,
                           const __grid_constant__ ClassifyTeam team,
                           const __grid_constant__ ClassifyLayout layout) {
  extern __shared__ __align__(128) char memory[];
  Classify<kDim, kRing>(params, team, layout, memory).run();
}

template <int kDim>
auto classify_kernel(int ring) {
  return ring == kLongRing ? decode_classify_kernel<kDim, kLongRing>
                           : decode_classify_kernel<kDim, kShortRing>;
}

template <int kDim>
int64_t classify_bytes(const ClassifyLayout& layout) {
  return static_cast<int64_t>(sizeof(ClassifyShared<kDim>)) + layout.bytes;
}

template <int kDim>
int clusters_at_once(int cluster, const ClassifyLayout& layout, const Device& device) {
  return teams_of(classify_kernel<kDim>(layout.steps), kClassifyThreads, cluster,
                  classify_bytes<kDim>(layout), device);
}

template <int kDim>
Status launch_classify(const ClassifyParams& params, ClassifyTeam team,
                       const ClassifyLayout& layout, cudaStream_t stream) {
  const LookupParams& lookup = params.lookup;
  LaunchOptions launch(lookup.requests * lookup.kv_heads * team.blocks(), kClassifyThreads,
                       team.cluster, lookup.device, stream);
  return launch_team(classify_kernel<kDim>(layout.steps), launch, classify_bytes<kDim>(layout),
                     params, team, layout);
}

}  // namespace sqz::cuda
