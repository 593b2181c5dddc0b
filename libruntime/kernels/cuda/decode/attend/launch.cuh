// The kernels of one head dimension and their launch.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode/attend/kernel.cuh"

namespace sqz::cuda {

template <class Element, int kDim, int kRows, bool kCoded, bool kOwn>
__global__ void __launch_bounds__(kAttendThreads, 1)
    decode_attend_kernel(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<AttendShared<kDim, kRows>*>(memory);
  Attend<Element, kDim, kRows, kCoded, kOwn>(params, shared).run();
}

template <class Element, int kDim, int kRows, bool kCoded>
auto attend_kernel(const AttendParams& params) {
  return params.own != nullptr ? decode_attend_kernel<Element, kDim, kRows, kCoded, true>
                               : decode_attend_kernel<Element, kDim, kRows, kCoded, false>;
}

template <int kDim, int kRows>
Status launch_attend_rows(const AttendParams& params, cudaStream_t stream) {
  const bool bf16 = params.dtype == DType::kBF16;
  const auto kernel = params.coded.present() ? bf16 ? attend_kernel<Bf16, kDim, kRows, true>(params)
                                                    : attend_kernel<F16, kDim, kRows, true>(params)
                      : bf16 ? attend_kernel<Bf16, kDim, kRows, false>(params)
                                             : attend_kernel<F16, kDim, kRows, false>(params);
  constexpr size_t kBytes = sizeof(AttendShared<kDim, kRows>);
  static_assert(kBytes <= kLeastBlockShared);
  return launch_blocks(kernel, std::min(params.device.multiprocessors, kMostBlocks), kAttendThreads,
                       kBytes, params.device, stream, params);
}

template <int kDim>
Status launch_attend(const AttendParams& params, cudaStream_t stream) {
  return params.group > 8 ? launch_attend_rows<kDim, 16>(params, stream)
                          : launch_attend_rows<kDim, 8>(params, stream);
}

}  // namespace sqz::cuda
