// Rows of 16-bit numbers, bf16 if nothing else is said, read by a warp.
#pragma once

#include <cstdint>

#include "libruntime/kernels/cuda/common/element.cuh"

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

template <class Element = Bf16>
__device__ __forceinline__ void unpack(const uint4& raw, float (&values)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = Element::low(words[i]);
    values[2 * i + 1] = Element::high(words[i]);
  }
}

template <class Element = Bf16>
__device__ __forceinline__ void store_row_part(void* row, int column, const float (&values)[8]) {
  static_cast<uint4*>(row)[column] =
      make_uint4(Element::pack(values[0], values[1]), Element::pack(values[2], values[3]),
                 Element::pack(values[4], values[5]), Element::pack(values[6], values[7]));
}

}  // namespace sqz::cuda
