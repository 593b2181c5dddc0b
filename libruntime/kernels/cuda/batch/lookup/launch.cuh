// The kernels of one head dimension and their launches.
#pragma once

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/batch/lookup/kernel.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"

namespace sqz::cuda {

template <class Element, int kDim>
Status launch_batch_level(const BatchLookup& call, int level, cudaStream_t stream) {
  const LookupParams& p = call.lookup;
  auto* sums =
      level == 0 ? batch_sums_kernel<Element, kDim, true> : batch_sums_kernel<Element, kDim, false>;
  auto* choose = p.rule == LookupRule::kBudget ? batch_choose_kernel<Element, kDim, true>
                                               : batch_choose_kernel<Element, kDim, false>;
  static_assert(sizeof(BatchSumsShared<kDim>) <= kLeastBlockShared);
  const auto launch = [&](auto* kernel, size_t shared) {
    return launch_blocks(kernel, call.launched(level), kBatchThreads, static_cast<int64_t>(shared),
                         p.device, stream, call, level);
  };
  SQZ_RETURN_IF_ERROR(launch(sums, sizeof(BatchSumsShared<kDim>)));
  return launch(choose, sizeof(BatchChoiceShared<kDim>));
}

// Denominators and the choice of a level; by the rule kBudget scores.
template <int kDim>
Status launch_batch_lookup(const BatchLookup& call, int level, cudaStream_t stream) {
  return call.lookup.dtype == DType::kBF16 ? launch_batch_level<Bf16, kDim>(call, level, stream)
                                           : launch_batch_level<F16, kDim>(call, level, stream);
}

}  // namespace sqz::cuda
