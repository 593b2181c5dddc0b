// Rows of 8 bits (docs/format.md, "Rows of codes") as the tensor cores take them: whole numbers up
// to 127, which bfloat16 has exactly. Scales and means are the caller's.
#pragma once

#include "libruntime/kernels/cuda/common/rows.cuh"

namespace sqz::cuda {

// Bytes 0 and 1 of a word, or 2 and 3, two's complement, as a pair of bf16. A number is its lower 7
// bits, less 128 if it is negative: 0x4300 is 128 and 0x4380 is 256.
template <int kHalf>
__device__ __forceinline__ uint32_t bf16_of_bytes(uint32_t word) {
  const uint32_t bytes = __byte_perm(word, 0x43434343u, kHalf == 0 ? 0x4140 : 0x4342);
  const uint32_t up = bytes & 0xFF7FFF7Fu, down = bytes & 0xFF80FF80u;
  const __nv_bfloat162 pair = __hsub2(reinterpret_cast<const __nv_bfloat162&>(up),
                                      reinterpret_cast<const __nv_bfloat162&>(down));
  return reinterpret_cast<const uint32_t&>(pair);
}

// What a lane holds of one row: lane 4 n + t bytes [64 c + 16 t, + 16) of row n, for each c, and of
// what is left, if 64 do not divide the row, 8 bytes.
template <int kDim>
struct RowPart8 {
  static constexpr int kWhole = kDim / 64;
  uint32_t words[kDim / 16];

  __device__ __forceinline__ void load(const char* row, int lane) {
#pragma unroll
    for (int c = 0; c < kWhole; ++c) {
      const uint4 part = load_stream(row + 64 * c + 16 * (lane % 4));
      words[4 * c] = part.x;
      words[4 * c + 1] = part.y;
      words[4 * c + 2] = part.z;
      words[4 * c + 3] = part.w;
    }
    if constexpr (kDim % 64 != 0) {
      const uint2 part = __ldg(reinterpret_cast<const uint2*>(row + 64 * kWhole + 8 * (lane % 4)));
      words[4 * kWhole] = part.x;
      words[4 * kWhole + 1] = part.y;
    }
  }

  // For make_query_rows(): which 8 dimensions meet words 2 h and 2 h + 1 of lane group t, if
  // `block` is 4 h + t.
  __device__ static int dims_of(int block) {
    const int h = block / 4, t = block % 4;
    return h / 2 < kWhole ? 8 * (h / 2) + 2 * t + h % 2 : 8 * kWhole + t;
  }
};

// As multiply_rows(): d[16, 8] += queries * rows, with queries made of bf16 for RowPart8.
template <int kDim, int kTiles>
__device__ __forceinline__ void multiply_rows_8(const QueryRows<kDim>& queries,
                                                const RowPart8<kDim> (&rows)[kTiles], int lane,
                                                float (&d)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const uint4 words = queries.words[i * 32 + lane];
    const uint32_t a[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint32_t word = rows[t].words[i];
      Bf16::mma(d[t], a, bf16_of_bytes<0>(word), bf16_of_bytes<1>(word));
    }
  }
}

}  // namespace sqz::cuda
