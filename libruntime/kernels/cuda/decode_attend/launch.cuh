// The kernels of one head dimension and their launch.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode_attend/kernel.cuh"

namespace sqz::cuda {

template <class Element, int kDim, bool kCache>
__global__ void __launch_bounds__(kAttendThreads, 1)
    decode_attend_kernel(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(16) char memory[];
  Attend<Element, kDim, kCache>(params, *reinterpret_cast<AttendShared<kDim>*>(memory)).run();
}

template <int kDim>
Status launch_attend(const AttendParams& params, cudaStream_t stream) {
  const bool bf16 = params.dtype == DType::kBF16, cache = params.cache.keys != nullptr;
  const auto kernel = bf16 ? (cache ? decode_attend_kernel<Bf16, kDim, true>
                                    : decode_attend_kernel<Bf16, kDim, false>)
                           : (cache ? decode_attend_kernel<F16, kDim, true>
                                    : decode_attend_kernel<F16, kDim, false>);
  constexpr size_t kBytes = sizeof(AttendShared<kDim>);
  static_assert(kBytes <= kLeastBlockShared);
  return launch_blocks(kernel, std::min(params.device.multiprocessors, kMostBlocks), kAttendThreads,
                       kBytes, params.device, stream, params);
}

}  // namespace sqz::cuda
