// Scores of pages: the upper bound of a query's logits with the keys of a page is max(q, 0) . max +
// min(q, 0) . min (libruntime/select/quest.cc). It is linear in the two parts of q, so the mean
// bound over a block's queries is the bound of their mean parts: one row a block. Pages stay in
// shared memory, and rows stream past.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/prefill/lookup/sm80/kernel.cuh"

namespace sqz::cuda {

inline constexpr int kPartThreads = 256;
inline constexpr int kPageStream = 16;  // rows that stream past at once

// The positive or the negative part of a number; NaN stays.
__device__ __forceinline__ float part_of(float x, bool positive) {
  return x != x ? x : positive ? fmaxf(x, 0.0f) : fminf(x, 0.0f);
}

// Fills call.parts: the sums of the parts over a piece of a pair's queries, a block of threads
// each.
template <int kDim>
__global__ void __launch_bounds__(kPartThreads)
    sm80_parts_kernel(const __grid_constant__ PrefillLookupParams call) {
  constexpr int kChunks = kDim / 8, kLanes = kPartThreads / kChunks;
  __shared__ float sums[kLanes][2 * kDim];
  const PrefillShape& p = call.shape;
  prefill::begin_dependent();
  const int item = static_cast<int>(blockIdx.x), piece = item % call.page_pieces;
  const Sm80Pair own(call, item / call.page_pieces);
  const int count = own.tokens * p.group;
  const int begin = static_cast<int>(int64_t{count} * piece / call.page_pieces);
  const int end = static_cast<int>(int64_t{count} * (piece + 1) / call.page_pieces);
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  if (first < kLanes) {
    float parts[2][8] = {};
#pragma unroll 4
    for (int i = begin + first; i < end; i += kLanes) {
      float x[8];
      load_8(call.q_dtype, call.queries, own.row_of(p, i / p.group, i % p.group) * kDim + chunk * 8,
             x);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        parts[0][c] += part_of(x[c], true);
        parts[1][c] += part_of(x[c], false);
      }
    }
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      sums[first][c / 8 * kDim + chunk * 8 + c % 8] = parts[c / 8][c % 8];
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < 2 * kDim; c += kPartThreads) {
    float sum = 0;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane][c];
    call.parts[int64_t{item} * 2 * kDim + c] = sum;
  }
}

// A row's parts to shared memory, each as what its type holds and what that rounded away.
template <class Element, int kDim>
struct PageRows {
  static constexpr int kWords = kPageStream * Sm80Tile<kDim>::kStride;
  uint16_t* high[2];  // of the positive and the negative part
  uint16_t* low[2];

  __device__ explicit PageRows(uint16_t* memory)
      : high{memory, memory + kWords}, low{memory + 2 * kWords, memory + 3 * kWords} {}

  // value(row, chunk, positive, out[8]) for rows below `rows`; the others are zero.
  template <class Value>
  __device__ void load(int rows, const Value& value) const {
    using Tile = Sm80Tile<kDim>;
#pragma unroll 1
    for (int item = threadIdx.x; item < 2 * kPageStream * Tile::kChunks; item += Tile::kThreads) {
      const int chunk = item % Tile::kChunks, row = item / Tile::kChunks % kPageStream;
      const int part = item / Tile::kChunks / kPageStream;
      float x[8] = {};
      if (row < rows) value(row, chunk, part == 0, x);
      uint32_t upper[4], lower[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) split<Element>(x[2 * i], x[2 * i + 1], upper[i], lower[i]);
      const int to = row * Tile::kStride + chunk * 8;
      *reinterpret_cast<uint4*>(high[part] + to) =
          make_uint4(upper[0], upper[1], upper[2], upper[3]);
      *reinterpret_cast<uint4*>(low[part] + to) =
          make_uint4(lower[0], lower[1], lower[2], lower[3]);
    }
  }
};

// Pages of a KV head in shared memory, 16 a warp, and the rows that stream past.
template <class Element, int kDim>
struct PageTile {
  using Tile = Sm80Tile<kDim>;
  static constexpr int kTiles = kPageStream / 8;
  uint16_t* bounds[2];  // greatest and least keys
  PageRows<Element, kDim> streamed;

  __device__ explicit PageTile(uint16_t* memory)
      : bounds{memory, memory + Tile::kRows * Tile::kStride},
        streamed(memory + 2 * Tile::kRows * Tile::kStride) {}

  // From page `first` on, the last one in the place of those that there are none of.
  __device__ void fetch(const PrefillLevel& level, int head, uint32_t first) const {
    const auto last = static_cast<uint32_t>(level.clusters - 1);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const auto* from = static_cast<const char*>(part == 0 ? level.greatest : level.centroids) +
                         int64_t{head} * level.clusters * kDim * 2;
      fetch_rows<kDim, Tile::kRows, Tile::kThreads>(
          [&](int r) { return from + int64_t{min(first + r, last)} * kDim * 2; }, bounds[part]);
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
  }

  // Bounds of the warp's pages, as add_product().
  __device__ void multiply(float (&d)[1][kTiles][4]) const {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint16_t* pages = bounds[part] + threadIdx.x / 32 * 16 * Tile::kStride;
      add_product<Element, kDim>(pages, streamed.high[part], d);
      add_product<Element, kDim>(pages, streamed.low[part], d);
    }
  }

  // Page of a lane's upper or lower row.
  __device__ static uint32_t page_of(uint32_t first, int row) {
    return first + threadIdx.x / 32 * 16 + 8 * row + threadIdx.x % 32 / 4;
  }
};

// Bounds by the mean parts of several blocks of queries at once, a column each.
template <class Element, int kDim>
__global__ void __launch_bounds__(Sm80Tile<kDim>::kThreads)
    sm80_bounds_kernel(const __grid_constant__ PrefillLookupParams call, int page_tiles) {
  extern __shared__ __align__(16) uint16_t memory[];
  const PageTile<Element, kDim> tile(memory);
  const PrefillShape& p = call.shape;
  prefill::begin_dependent();
  const int item = static_cast<int>(blockIdx.x), head = item / page_tiles % p.kv_heads;
  const int first_block = item / page_tiles / p.kv_heads * kPageStream;
  const auto first = static_cast<uint32_t>(item % page_tiles * Sm80Tile<kDim>::kRows);
  tile.fetch(call.level, head, first);
  const auto pair_of = [&](int column) {
    return int64_t{first_block + column} * p.kv_heads + head;
  };
  const int columns = min(kPageStream, call.blocks.count - first_block);
  tile.streamed.load(columns, [&](int column, int chunk, bool positive, float(&x)[8]) {
    const int tokens = block_of(call.blocks, first_block + column).y;
    const float weight = 1.0f / static_cast<float>(tokens * p.group);
#pragma unroll 1
    for (int piece = 0; piece < call.page_pieces; ++piece) {
      float y[8];
      load_8(DType::kF32, call.parts,
             ((pair_of(column) * call.page_pieces + piece) * 2 + !positive) * kDim + chunk * 8, y);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] += y[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= weight;
  });
  __syncthreads();
  float d[1][PageTile<Element, kDim>::kTiles][4] = {};
  tile.multiply(d);
#pragma unroll
  for (int i = 0; i < 4 * PageTile<Element, kDim>::kTiles; ++i) {
    const int column = i / 4 * 8 + 2 * static_cast<int>(threadIdx.x % 4) + i % 2;
    const uint32_t page = tile.page_of(first, i % 4 / 2);
    const float bound = d[0][i / 4][i % 4];
    if (column >= columns) continue;
    if (!(fabsf(bound) <= FLT_MAX)) call.chosen.totals[pair_of(column)].fault = 1;
    if (page >= static_cast<uint32_t>(call.level.clusters)) continue;
    call.columns[pair_of(column) * call.level.clusters + page] = bound;
  }
}

}  // namespace sqz::cuda
