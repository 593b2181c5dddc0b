// Stores the state of a consumer warpgroup at the end of an item, 64 rows in wgmma's layout.
#pragma once

#include <type_traits>

#include "libruntime/kernels/cuda/prefill/attend/sm90/config.h"
#include "libruntime/kernels/cuda/prefill/attend/sm90/kernel.h"
#include "libruntime/kernels/cuda/prefill/attend/softmax.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"
#include "libruntime/kernels/cuda/ptx/named_barrier.cuh"

namespace sqz::cuda::prefill {

// Joins the states that the two warpgroups of a small-M call have of the same rows: the first one
// is left with the first half of the columns, the other with the second. `out` is normalised. A
// thread exchanges with the one that has the same rows, through the half of the queries' shared
// memory that a small-M call has no rows for.
template <class Config>
__device__ __forceinline__ void join_states(SharedStorage<Config>& shared, int warpgroup,
                                            float (&out)[Config::kDim / 2], float (&lse)[2]) {
  constexpr int kHalf = Config::kDim / 4;  // numbers of a thread
  constexpr std::integral_constant<int, 0> first_half;
  constexpr std::integral_constant<int, kHalf> second_half;
  const int thread = static_cast<int>(threadIdx.x) % 128,
            row = 16 * (thread / 32) + thread % 32 / 4;
  const float own_lse[2] = {lse[0], lse[1]};
  const auto place = [&](int i) -> float& {
    uint8_t* unused = shared.queries + (i / 16 * kRows + kRows / 2) * kRowBytes;
    return reinterpret_cast<float*>(unused)[i % 16 * 128 + thread];
  };
  const auto give = [&](auto first) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) place(i) = out[first + i];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (thread % 4 == 0) shared.lse[warpgroup][row + 8 * half] = own_lse[half];
    }
  };
  const auto take = [&](auto first) {
    float own[2], others[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float other = shared.lse[1 - warpgroup][row + 8 * half];
      const float maximum = fmaxf(lse[half], other);
      own[half] = lse[half] == -INFINITY ? 0.0f : expf(lse[half] - maximum);
      others[half] = other == -INFINITY ? 0.0f : expf(other - maximum);
      const float sum = own[half] + others[half], inverse = sum == 0 ? 0.0f : 1 / sum;
      own[half] *= inverse;
      others[half] *= inverse;
      lse[half] = sum == 0 ? -INFINITY : maximum + logf(sum);
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int half = i / 2 % 2;
      out[first + i] = own[half] * out[first + i] + others[half] * place(i);
    }
  };
  const auto wait = [] { ptx::bar_sync(1, 32 * Config::kConsumerWarps); };
  if (warpgroup == 1) give(first_half);
  wait();
  if (warpgroup == 0) {
    take(first_half);
    give(second_half);
  }
  wait();
  if (warpgroup == 1) take(second_half);
}

// Numbers [kFirst, kEnd) of a thread's `out`, those of row r + 8 half: to partial state `state`, or
// where that is -1 to the output of a query.
template <class T, class Config, int kFirst, int kEnd>
__device__ __forceinline__ void store_row(const PrefillAttendParams& params, int64_t state,
                                          int64_t query, int half,
                                          const float (&out)[Config::kDim / 2]) {
  const int lane = threadIdx.x & 3;
  float* partial = params.partial_out + state * Config::kDim + 2 * lane;
  auto* final = reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + query * Config::kDim);
#pragma unroll
  for (int j = kFirst / 4; j < kEnd / 4; ++j) {
    const float2 pair = make_float2(out[4 * j + 2 * half], out[4 * j + 2 * half + 1]);
    if (state >= 0) {
      *reinterpret_cast<float2*>(partial + 8 * j) = pair;
    } else {
      final[4 * j + lane] = pack_result<T>(pair.x, pair.y);
    }
  }
}

}  // namespace sqz::cuda::prefill
