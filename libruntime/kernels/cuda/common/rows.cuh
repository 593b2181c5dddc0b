// Products of query rows with rows in memory. The rows of one GQA group are the M side of an mma:
// its 8 upper rows take the queries rounded to 16 bits, its 8 lower ones what the rounding lost, so
// that products are those of 32-bit queries. Rows from memory are the N side, straight into
// registers: lane 4 n + t loads bytes [64 c + 16 t, + 16) of row n, for each c. That permutes the
// dimensions, alike for both sides.
#pragma once

#include "libruntime/kernels/cuda/common/element.cuh"

namespace sqz::cuda {

// One query row set of a warp, [dim / 16] fragments a lane, in shared memory: fragment(k) is
// words[k * 32 + lane].
template <int kDim>
struct QueryRows {
  uint4 words[kDim / 16 * 32];
};

// Writes the fragments of `rows` queries, row r being value(r, c, out[8]) for dimensions 8 c ...
template <class Element, int kDim, class Value>
__device__ __forceinline__ void make_query_rows(QueryRows<kDim>& to, int rows, int thread,
                                                int threads, const Value& value) {
  // An item is 8 dimensions of a row: two fragments of one lane.
#pragma unroll 1
  for (int item = thread; item < kDim / 32 * 32; item += threads) {
    const int lane = item % 32, chunk = item / 32;
    const int row = lane / 4;
    float x[8] = {};
    if (row < rows) value(row, chunk * 4 + lane % 4, x);
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) split<Element>(x[2 * i], x[2 * i + 1], high[i], low[i]);
    to.words[(2 * chunk) * 32 + lane] = make_uint4(high[0], low[0], high[1], low[1]);
    to.words[(2 * chunk + 1) * 32 + lane] = make_uint4(high[2], low[2], high[3], low[3]);
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

// d[16, 8] += queries * rows: of 8 rows from memory each. Query row r = lane / 4 against row 2 t is
// d[0] + d[2], against 2 t + 1 d[1] + d[3], with t = lane % 4.
template <class Element, int kDim, int kTiles>
__device__ __forceinline__ void multiply_rows(const QueryRows<kDim>& queries,
                                              const RowPart<kDim> (&rows)[kTiles], int lane,
                                              float (&d)[kTiles][4]) {
#pragma unroll
  for (int c = 0; c < kDim / 32; ++c) {
    const uint4 even = queries.words[2 * c * 32 + lane];
    const uint4 odd = queries.words[(2 * c + 1) * 32 + lane];
    const uint32_t a0[4] = {even.x, even.y, even.z, even.w};
    const uint32_t a1[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) Element::mma(d[t], a0, rows[t].words[c].x, rows[t].words[c].y);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) Element::mma(d[t], a1, rows[t].words[c].z, rows[t].words[c].w);
  }
}

}  // namespace sqz::cuda
