// Products of query rows with rows in memory. The rows of one GQA group are the M side of an mma.
// Up to 8 are its upper rows, rounded to 16 bits, and its 8 lower ones are what the rounding lost;
// up to 16 take two mma, one of the rounded rows and one of the rest. Both give the products of
// 32-bit queries. Rows from memory are the N side, straight into registers: lane 4 n + t loads
// bytes [64 c + 16 t, + 16) of row n, for each c. That permutes the dimensions, alike for both
// sides.
#pragma once

#include "libruntime/kernels/cuda/common/element.cuh"

namespace sqz::cuda {

// kRows query rows, 8 or 16, in shared memory: for each mma [dim / 16] fragments a lane, of which
// fragment(k) is words[k * 32 + lane].
template <int kDim, int kRows = 8>
struct QueryRows {
  static constexpr int kProducts = kRows / 8;        // mma for a product
  static constexpr int kFragments = kDim / 16 * 32;  // words of one
  uint4 words[kProducts * kFragments];
};

// Writes the fragments of `rows` queries, row r being value(r, c, out[8]) for dimensions 8 c ...
template <class Element, int kDim, int kRows, class Value>
__device__ __forceinline__ void make_query_rows(QueryRows<kDim, kRows>& to, int rows, int thread,
                                                int threads, const Value& value) {
  constexpr int kParts = kRows / 8;
  // An item is 8 dimensions of a row, or of two: two fragments of one lane.
#pragma unroll 1
  for (int item = thread; item < kDim / 32 * 32; item += threads) {
    const int lane = item % 32, chunk = item / 32;
    uint32_t high[kParts][4], low[kParts][4];
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const int row = lane / 4 + 8 * p;
      float x[8] = {};
      if (row < rows) value(row, chunk * 4 + lane % 4, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) split<Element>(x[2 * i], x[2 * i + 1], high[p][i], low[p][i]);
    }
    const auto put = [&](int product, const uint32_t(&upper)[4], const uint32_t(&lower)[4]) {
      uint4* words = to.words + product * to.kFragments + 2 * chunk * 32 + lane;
      words[0] = make_uint4(upper[0], lower[0], upper[1], lower[1]);
      words[32] = make_uint4(upper[2], lower[2], upper[3], lower[3]);
    };
    if constexpr (kRows == 8) {
      put(0, high[0], low[0]);
    } else {
      put(0, high[0], high[1]);
      put(1, low[0], low[1]);
    }
  }
}

// A lane's part of one row.
template <int kDim>
struct RowPart {
  uint4 words[kDim / 32];

  __device__ __forceinline__ void load(const char* row, int lane) {
#pragma unroll
    for (int c = 0; c < kDim / 32; ++c) words[c] = load_stream(row + 64 * c + 16 * (lane % 4));
  }
  // load() of a row that is read again.
  __device__ __forceinline__ void load_kept(const char* row, int lane) {
#pragma unroll
    for (int c = 0; c < kDim / 32; ++c) {
      words[c] = sqz::cuda::load_kept(row + 64 * c + 16 * (lane % 4));
    }
  }
};

// d[16, 8] += queries * rows: of 8 rows from memory each. product_of() reads the results.
template <class Element, int kDim, int kTiles, int kRows>
__device__ __forceinline__ void multiply_rows(const QueryRows<kDim, kRows>& queries,
                                              const RowPart<kDim> (&rows)[kTiles], int lane,
                                              float (&d)[kTiles][4]) {
#pragma unroll
  for (int c = 0; c < kDim / 32; ++c) {
#pragma unroll
    for (int p = 0; p < kRows / 8; ++p) {
      const uint4* words = queries.words + p * queries.kFragments + 2 * c * 32 + lane;
      const uint4 even = words[0], odd = words[32];
      const uint32_t a0[4] = {even.x, even.y, even.z, even.w};
      const uint32_t a1[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        Element::mma(d[t], a0, rows[t].words[c].x, rows[t].words[c].y);
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        Element::mma(d[t], a1, rows[t].words[c].z, rows[t].words[c].w);
      }
    }
  }
}

// A lane has query row lane / 4 + 8 part of a tile against row 2 (lane % 4) + i.
template <int kRows>
__device__ __forceinline__ float product_of(const float (&d)[4], int part, int i) {
  return kRows == 8 ? d[i] + d[i + 2] : d[2 * part + i];
}

}  // namespace sqz::cuda
