// Rows of bf16 read by a warp.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sqz::cuda {

// Rows are read 16 bytes a lane: dim / 8 lanes a row, as many rows at once as fit a warp.
struct RowLanes {
  int lanes, rows, row, column;  // row >= rows: an idle lane

  explicit __device__ RowLanes(int dim)
      : lanes(dim / 8),
        rows(32 / lanes),
        row((threadIdx.x & 31) / lanes),
        column((threadIdx.x & 31) % lanes) {}
};

__device__ __forceinline__ void unpack(const uint4& raw, float (&values)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  return static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
         static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

__device__ __forceinline__ void store_row_part(__nv_bfloat16* row, int column,
                                               const float (&values)[8]) {
  reinterpret_cast<uint4*>(row)[column] =
      make_uint4(pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
                 pack(values[6], values[7]));
}

}  // namespace sqz::cuda
