// Rows of 8 bits (docs/format.md, "Rows of codes") as the tensor cores take them: as they are, or
// as whole numbers up to 127, which bfloat16 has exactly. Scales and means are the caller's.
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

  // `from`: byte 16 (lane % 4) of the row.
  __device__ __forceinline__ void load(const char* from, int lane) {
#pragma unroll
    for (int c = 0; c < kWhole; ++c) {
      const uint4 part = load_stream(from + 64 * c);
      words[4 * c] = part.x;
      words[4 * c + 1] = part.y;
      words[4 * c + 2] = part.z;
      words[4 * c + 3] = part.w;
    }
    if constexpr (kDim % 64 != 0) {
      const uint2 part = __ldg(reinterpret_cast<const uint2*>(from + 64 * kWhole - 8 * (lane % 4)));
      words[4 * kWhole] = part.x;
      words[4 * kWhole + 1] = part.y;
    }
  }

  // The first of the 4 dimensions of word w of a lane 4 n + t.
  __device__ static constexpr int dims_of(int w, int t) {
    return w / 4 < kWhole ? 64 * (w / 4) + 16 * t + 4 * (w % 4) : 64 * kWhole + 8 * t + 4 * (w % 4);
  }
};

// kRows query rows, 8 or 16, in fixed point: a row is scale * (256 high + low), within 2^-16 of its
// largest number. High and low are the upper and the lower rows of an mma, or of two, as in
// QueryRows.
template <int kDim, int kRows>
struct QueryCodes {
  static constexpr int kProducts = kRows / 8, kSteps = kDim / 32;
  uint4 words[kProducts][kSteps][32];  // fragments of each lane
  float scales[kRows];
};

inline constexpr float kMostFixed = 127 * 256;  // the largest number of a row in fixed point

// Four numbers of at most 127 * 256 as the upper and the lower bytes of a fixed-point row.
__device__ __forceinline__ void split_fixed(const int (&x)[4], uint32_t& high, uint32_t& low) {
  const auto bytes_of = [](int a, int b, int c, int d, uint32_t byte) {
    const uint32_t pair = byte | (byte + 4) << 4;
    return __byte_perm(__byte_perm(a, b, pair), __byte_perm(c, d, pair), 0x5410);
  };
  low = bytes_of(x[0], x[1], x[2], x[3], 0);
  high = bytes_of(x[0] + 128, x[1] + 128, x[2] + 128, x[3] + 128, 1);
}

// Writes `rows` queries, value(row, dimension, out[4]) being 4 numbers of one. A warp takes a row.
template <int kDim, int kRows, class Value>
__device__ __forceinline__ void make_query_codes(QueryCodes<kDim, kRows>& to, int rows, int warp,
                                                 int warps, int lane, const Value& value) {
  constexpr int kWords = kDim / 4, kOwn = (kWords + 31) / 32;
#pragma unroll 1
  for (int row = warp; row < kRows; row += warps) {
    float x[kOwn][4] = {}, most = 0;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int at = lane + 32 * own;
      if (row < rows && at < kWords) value(row, RowPart8<kDim>::dims_of(at / 4, at % 4), x[own]);
#pragma unroll
      for (const float number : x[own]) most = fmaxf(most, fabsf(number));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float inverse = most > 0 ? kMostFixed / most : 0;
    if (lane == 0) to.scales[row] = most / kMostFixed;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      int numbers[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) numbers[i] = __float2int_rn(x[own][i] * inverse);
      uint32_t high, low;
      split_fixed(numbers, high, low);
      const int word = (lane + 32 * own) / 4, t = lane % 4;
      if (word >= kDim / 16) continue;
      const auto put = [&](int product, int part, uint32_t codes) {
        reinterpret_cast<uint32_t*>(
            &to.words[product][word / 2][4 * (row % 8) + t])[word % 2 * 2 + part] = codes;
      };
      put(0, row / 8, high);
      if constexpr (kRows == 8) {
        put(0, 1, low);
      } else {
        put(1, row / 8, low);
      }
    }
  }
}

// A lane has query row lane / 4 + 8 part of a tile against row 2 (lane % 4) + i. `high`, `low`: the
// products of upper and of lower bytes, for 8 rows the same one.
template <int kRows>
__device__ __forceinline__ int product_of(const int (&high)[4], const int (&low)[4], int part,
                                          int i) {
  return 256 * high[2 * part + i] + (kRows == 8 ? low[i + 2] : low[2 * part + i]);
}

// Products with rows from memory, in units of the queries' scales: a lane has query row lane / 4 +
// 8 part against row 2 (lane % 4) + i of tile t in d[t][part][i].
template <int kDim, int kTiles, int kRows>
__device__ __forceinline__ void multiply_codes(const QueryCodes<kDim, kRows>& queries,
                                               const RowPart8<kDim> (&rows)[kTiles], int lane,
                                               int (&d)[kTiles][kRows / 8][2]) {
  int sums[kRows / 8][kTiles][4] = {};
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) {
#pragma unroll
    for (int p = 0; p < kRows / 8; ++p) {
      const uint4 words = queries.words[p][k][lane];
      const uint32_t a[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        ptx::mma_m16n8k32_s8(sums[p][t], a, rows[t].words[2 * k], rows[t].words[2 * k + 1]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int part = 0; part < kRows / 8; ++part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        d[t][part][i] = product_of<kRows>(sums[0][t], sums[kRows / 8 - 1][t], part, i);
      }
    }
  }
}

}  // namespace sqz::cuda
