// Sums of normalised vectors that do not depend on the order of addition: components in fixed
// point, 21 bits after the point, added as integers.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "libindex/cuda/kmeans/common/reduce.cuh"
#include "libindex/cuda/kmeans/common/rows.cuh"

namespace sqz::cuda {

inline constexpr float kFixedScale = 1 << 21;

// value * scale rounded to an integer; |value * scale| <= 2^22.
__device__ __forceinline__ int32_t to_fixed(float value, float scale) {
  constexpr float kMagic = 3 << 22;  // 1.5 2^23: the sum's last bits are the integer
  return __float_as_int(fmaf(value, scale, kMagic)) - 0x4B400000;
}
static_assert(0x4B400000 == ((127 + 23) << 23) + (1 << 22));

// Sum is int32_t for at most 512 rows without weights, else int64_t.
template <class Sum>
struct VectorSum {
  Sum part[8] = {};

  __device__ __forceinline__ void add(const uint4& raw, float inverse_norm, uint32_t weight) {
    float values[8];
    unpack(raw, values);
    const float scale = inverse_norm * kFixedScale;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if constexpr (sizeof(Sum) == 8) {
        part[e] += static_cast<Sum>(to_fixed(values[e], scale)) * static_cast<Sum>(weight);
      } else {
        part[e] += to_fixed(values[e], scale);
      }
    }
  }

  // Sums over the rows that a warp reads at once; valid in lanes with row 0.
  __device__ __forceinline__ void fold(const RowLanes& lanes) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      Sum total = part[e];
      for (int r = 1; r < lanes.rows; ++r) {
        total += __shfl_sync(~0u, part[e], lanes.column + r * lanes.lanes);
      }
      part[e] = total;
    }
  }
};

// Writes sum / |sum| to a centroid; leaves it alone if the sum is zero. A whole warp; lanes beyond
// row 0 take part in the reduction only.
template <class Sum>
__device__ __forceinline__ void store_direction(__nv_bfloat16* centroid, const RowLanes& lanes,
                                                const VectorSum<Sum>& sum) {
  double square = 0;
  if (lanes.row == 0) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      square = fma(static_cast<double>(sum.part[e]), static_cast<double>(sum.part[e]), square);
    }
  }
  square = warp_sum(square);
  if (square == 0 || lanes.row != 0) return;
  const double inverse = 1 / sqrt(square);
  float values[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    values[e] = static_cast<float>(static_cast<double>(sum.part[e]) * inverse);
  }
  store_row_part(centroid, lanes.column, values);
}

}  // namespace sqz::cuda
