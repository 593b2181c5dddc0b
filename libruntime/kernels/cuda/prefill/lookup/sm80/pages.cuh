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
  begin_dependent();
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

// Bounds by the mean parts of several blocks of queries at once, a column each. Pages stay in
// shared memory, greatest keys and least ones, 16 a warp; behind them are positive and negative
// parts, each as what its type holds and what that rounded away.
template <class Element, int kDim>
__global__ void __launch_bounds__(Sm80Tile<kDim>::kThreads)
    sm80_bounds_kernel(const __grid_constant__ PrefillLookupParams call, int page_tiles) {
  using Tile = Sm80Tile<kDim>;
  constexpr int kTiles = kPageStream / 8;
  constexpr int kPageWords = Tile::kRows * Tile::kStride, kRowWords = kPageStream * Tile::kStride;
  extern __shared__ __align__(16) uint16_t memory[];
  const PrefillShape& p = call.shape;
  begin_dependent();
  const int item = static_cast<int>(blockIdx.x), head = item / page_tiles % p.kv_heads;
  const int first_block = item / page_tiles / p.kv_heads * kPageStream;
  const int columns = min(kPageStream, call.blocks.count - first_block);
  const int pages = call.level.clusters, first = item % page_tiles * Tile::kRows;
  const auto pair_of = [&](int column) {
    return int64_t{first_block + column} * p.kv_heads + head;
  };
  const auto rows_of = [&](int part) { return memory + 2 * kPageWords + 2 * part * kRowWords; };
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const auto* from =
        static_cast<const char*>(part == 0 ? call.level.greatest : call.level.centroids);
    fetch_rows<kDim, Tile::kRows, Tile::kThreads>(
        [&](int r) {
          return from + (int64_t{head} * pages + min(first + r, pages - 1)) * kDim * 2;
        },
        memory + part * kPageWords);
  }
  ptx::cp_async_commit_group();
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const auto mean = [&](int column, int chunk, float(&x)[8]) {
      if (column >= columns) return;
      const int tokens = block_of(call.blocks, first_block + column).y;
      const float weight = 1.0f / static_cast<float>(tokens * p.group);
#pragma unroll 1
      for (int piece = 0; piece < call.page_pieces; ++piece) {
        const int64_t at = (pair_of(column) * call.page_pieces + piece) * 2 + part;
        float y[8];
        load_8(DType::kF32, call.parts, at * kDim + chunk * 8, y);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += y[i];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= weight;
    };
    split_rows<Element, kDim, kPageStream, Tile::kThreads>(mean, rows_of(part),
                                                           rows_of(part) + kRowWords);
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  const int own = threadIdx.x / 32 * 16;
  float d[1][kTiles][4] = {};
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const uint16_t* bounds = memory + part * kPageWords + own * Tile::kStride;
    add_product<Element, kDim>(bounds, rows_of(part), d);
    add_product<Element, kDim>(bounds, rows_of(part) + kRowWords, d);
  }
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    const int column = i / 4 * 8 + 2 * static_cast<int>(threadIdx.x % 4) + i % 2;
    const int page = first + own + 8 * (i % 4 / 2) + static_cast<int>(threadIdx.x % 32 / 4);
    const float bound = d[0][i / 4][i % 4];
    if (column >= columns) continue;
    if (!(fabsf(bound) <= FLT_MAX)) call.chosen.totals[pair_of(column)].fault = 1;
    if (page < pages) call.columns[pair_of(column) * pages + page] = bound;
  }
}

}  // namespace sqz::cuda
