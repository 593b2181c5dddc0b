// Rows of 8 bits (docs/format.md, "Rows of codes") as the tensor cores take them: whole numbers up
// to 127, which bfloat16 has exactly. Scales and means are the caller's.
#pragma once

#include <type_traits>

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

// The same as a pair of f16: 0x6400 is 1024, and 0x6480 is 1152.
template <int kHalf>
__device__ __forceinline__ uint32_t f16_of_bytes(uint32_t word) {
  const uint32_t up = __byte_perm(word ^ 0x80808080u, 0x64646464u, kHalf == 0 ? 0x4140 : 0x4342);
  const uint32_t down = 0x64806480u;
  const __half2 pair =
      __hsub2(reinterpret_cast<const __half2&>(up), reinterpret_cast<const __half2&>(down));
  return reinterpret_cast<const uint32_t&>(pair);
}

// Two numbers of a row, of pairs of them, of their means and of the row's scale; rounded once.
template <class Element>
__device__ __forceinline__ uint32_t decode_pair(uint32_t numbers, uint32_t scales, uint32_t means) {
  using Pair = std::conditional_t<std::is_same_v<Element, F16>, __half2, __nv_bfloat162>;
  const Pair pair =
      __hfma2(reinterpret_cast<const Pair&>(numbers), reinterpret_cast<const Pair&>(scales),
              reinterpret_cast<const Pair&>(means));
  return reinterpret_cast<const uint32_t&>(pair);
}
// Eight of them. `scales`: the scale twice.
template <class Element>
__device__ __forceinline__ uint4 decode_8(uint2 bytes, uint32_t scales, uint4 means) {
  const auto two = [&](auto half, uint32_t word, uint32_t means_of) {
    constexpr int kHalf = decltype(half)::value;
    const uint32_t numbers =
        std::is_same_v<Element, F16> ? f16_of_bytes<kHalf>(word) : bf16_of_bytes<kHalf>(word);
    return decode_pair<Element>(numbers, scales, means_of);
  };
  constexpr std::integral_constant<int, 0> kLow;
  constexpr std::integral_constant<int, 1> kHigh;
  return make_uint4(two(kLow, bytes.x, means.x), two(kHigh, bytes.x, means.y),
                    two(kLow, bytes.y, means.z), two(kHigh, bytes.y, means.w));
}

// A lane's part of one row: lane 4 n + t has bytes [64 c + 16 t, + 16) of row n, for each c, and of
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
template <int kDim, int kTiles, int kRows>
__device__ __forceinline__ void multiply_rows_8(const QueryRows<kDim, kRows>& queries,
                                                const RowPart8<kDim> (&rows)[kTiles], int lane,
                                                float (&d)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    uint32_t b[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      b[t][0] = bf16_of_bytes<0>(rows[t].words[i]);
      b[t][1] = bf16_of_bytes<1>(rows[t].words[i]);
    }
#pragma unroll
    for (int p = 0; p < kRows / 8; ++p) {
      const uint4 words = queries.words[p * queries.kFragments + i * 32 + lane];
      const uint32_t a[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) Bf16::mma(d[t], a, b[t][0], b[t][1]);
    }
  }
}

}  // namespace sqz::cuda
