// Choices that are arbitrary but always the same.
#pragma once

#include "libindex/cuda/kmeans/update/fixed_point.cuh"
#include "libindex/cuda/kmeans/update/kernel.h"

namespace sqz::cuda {

// A bijection that scatters (the finaliser of SplitMix64).
__device__ __forceinline__ uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Makes a point, normalised, a centroid; a zero point becomes the first unit vector. A whole warp.
__device__ __forceinline__ void store_unit_point(const UpdateParams& params, int64_t cluster,
                                                 int64_t point, const RowLanes& lanes) {
  if (lanes.row != 0) return;
  const float inverse_norm = params.inverse_norms[point];
  float values[8];
  unpack(reinterpret_cast<const uint4*>(params.points)[point * lanes.lanes + lanes.column], values);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    values[e] =
        inverse_norm > 0 ? values[e] * inverse_norm : (lanes.column == 0 && e == 0 ? 1.0f : 0.0f);
  }
  store_row_part(params.centroids + cluster * params.dim, lanes.column, values);
}

}  // namespace sqz::cuda
