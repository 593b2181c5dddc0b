// The kernels of one head dimension and their launch.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode/attend/kernel.cuh"

namespace sqz::cuda {

template <class Element, int kDim, bool kCoded>
__global__ void __launch_bounds__(kAttendThreads, 1)
    decode_attend_kernel(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(16) char memory[];
  Attend<Element, kDim, kCoded>(params, *reinterpret_cast<AttendShared<kDim>*>(memory)).run();
}

template <class Element, int kDim>
auto attend_kernel_of(const AttendParams& params) {
  return params.coded.present() ? decode_attend_kernel<Element, kDim, true>
                                : decode_attend_kernel<Element, kDim, false>;
}

template <int kDim>
Status launch_attend(const AttendParams& params, cudaStream_t stream) {
  const auto kernel = params.dtype == DType::kBF16 ? attend_kernel_of<Bf16, kDim>(params)
                                                   : attend_kernel_of<F16, kDim>(params);
  constexpr size_t kBytes = sizeof(AttendShared<kDim>);
  static_assert(kBytes <= kLeastBlockShared);
  return launch_blocks(kernel, std::min(params.device.multiprocessors, kMostBlocks), kAttendThreads,
                       kBytes, params.device, stream, params);
}

}  // namespace sqz::cuda
