// Partial states of a row, one a slot, merged in the order of their keys by a warp.
#pragma once

#include "libruntime/kernels/cuda/prefill_attend/kernel.h"
#include "libruntime/kernels/cuda/prefill_attend/softmax.cuh"

namespace sqz::cuda::prefill {

inline constexpr int kMergeColumns = 64;  // of a row, that a warp merges at once: two a lane

// Columns [first, first + kMergeColumns) of row `row` of `states` slots from `slot` on, each of
// kSlotRows rows. kBatch: states whose rows are under way at once.
template <class T, int kSlotRows, int kBatch>
__device__ __forceinline__ void merge_row(const PrefillAttendParams& params, int slot, int states,
                                          int row, int first, int64_t query) {
  static_assert(kBatch <= 32);
  const int lane = threadIdx.x & 31, column = first + 2 * lane;
  const bool is = column < params.shape.dim;
  const int64_t at = static_cast<int64_t>(slot) * kSlotRows + row;
  const float* lse = params.partial_lse + at;
  const float* from = params.partial_out + at * params.shape.dim + (is ? column : 0);
  const int64_t stride = int64_t{kSlotRows} * params.shape.dim;
  float2 values[kBatch];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      values[i] = make_float2(0, 0);
      if (begin + i < states) {
        values[i] = __ldcg(reinterpret_cast<const float2*>(from + (begin + i) * stride));
      }
    }
  };
  load(0);
  float maximum = -INFINITY;
  for (int i = lane; i < states; i += 32) maximum = fmaxf(maximum, __ldcg(lse + i * kSlotRows));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
  }
  float sum = 0;
  float2 out = {0, 0};
  for (int begin = 0; begin < states; begin += kBatch) {
    if (begin > 0) load(begin);
    // A lane has the weight of one of the states. A fault, NaN, stays one.
    const float own = lane < kBatch && begin + lane < states
                          ? __ldcg(lse + (begin + lane) * kSlotRows)
                          : -INFINITY;
    const float own_weight = own == -INFINITY ? 0.0f : expf(own - maximum);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float weight = __shfl_sync(~0u, own_weight, i);
      sum += weight;
      out.x += weight * values[i].x;
      out.y += weight * values[i].y;
    }
  }
  const float inverse = sum == 0 ? 0.0f : 1 / sum;
  if (is) {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + query * params.shape.dim + column) =
        pack_pair<T>(out.x * inverse, out.y * inverse);
  }
  if (column == 0) params.lse[query] = sum == 0 ? -INFINITY : maximum + logf(sum);
}

}  // namespace sqz::cuda::prefill
