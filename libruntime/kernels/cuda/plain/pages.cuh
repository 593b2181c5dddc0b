// Scores of pages: the upper bound of a query's logits with the keys of a page is max(q, 0) . max +
// min(q, 0) . min (libruntime/select/quest.cc). It is linear in the two parts of q, so that rows
// here are what the policy makes of a block's queries: their mean parts, or each of them. Pages
// stay, rows stream past, and a page's score is the greatest of its bounds.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/plain/lookup.cuh"

namespace sqz::cuda {

inline constexpr int kPartThreads = 256;
inline constexpr int kPageStream = 16;  // rows that stream past at once

// The positive or the negative part of a number; NaN stays.
__device__ __forceinline__ float part_of(float x, bool positive) {
  return x != x ? x : positive ? fmaxf(x, 0.0f) : fminf(x, 0.0f);
}

// Rows of mean parts that a pair has: the policy `max` has one for each head.
__device__ __forceinline__ int mean_rows(const PlainLookup& call) {
  return call.policy == PrefillGroup::kMax ? call.token.group : 1;
}

// call.parts: the mean parts of a row of a pair, a block of threads each.
template <int kDim>
__global__ void __launch_bounds__(kPartThreads)
    plain_parts_kernel(const __grid_constant__ PlainLookup call) {
  constexpr int kChunks = kDim / 8, kLanes = kPartThreads / kChunks;
  __shared__ float sums[kLanes][2 * kDim];
  const LookupParams& p = call.token;
  const int rows = mean_rows(call), row = static_cast<int>(blockIdx.x) % rows;
  const PlainPair own(call, 0, static_cast<int>(blockIdx.x) / rows);
  const int heads = rows > 1 ? 1 : p.group;
  const int count = own.tokens * heads;
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  float parts[2][8] = {};
  if (first < kLanes) {
#pragma unroll 4
    for (int i = first; i < count; i += kLanes) {
      float x[8];
      load_8(p.q_dtype, p.q, own.row_of(p, i / heads, row + i % heads) * kDim + chunk * 8, x);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        parts[0][c] += part_of(x[c], true);
        parts[1][c] += part_of(x[c], false);
      }
    }
#pragma unroll
    for (int c = 0; c < 16; ++c)
      sums[first][c / 8 * kDim + chunk * 8 + c % 8] = parts[c / 8][c % 8];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < 2 * kDim; c += kPartThreads) {
    float sum = 0;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane][c];
    call.parts[static_cast<int64_t>(blockIdx.x) * 2 * kDim + c] = sum / static_cast<float>(count);
  }
}

// A row's parts to shared memory, each as what its type holds and what that rounded away.
template <class Element, int kDim>
struct PageRows {
  static constexpr int kWords = kPageStream * PlainTile<kDim>::kStride;
  uint16_t* high[2];  // of the positive and the negative part
  uint16_t* low[2];

  __device__ explicit PageRows(uint16_t* memory)
      : high{memory, memory + kWords}, low{memory + 2 * kWords, memory + 3 * kWords} {}

  // value(row, chunk, positive, out[8]) for rows below `rows`; the others are zero.
  template <class Value>
  __device__ void load(int rows, const Value& value) const {
    using Tile = PlainTile<kDim>;
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

template <class Element, int kDim>
__global__ void __launch_bounds__(PlainTile<kDim>::kThreads)
    plain_bounds_kernel(const __grid_constant__ PlainLookup call, int page_tiles) {
  using Tile = PlainTile<kDim>;
  constexpr int kTiles = kPageStream / 8;
  extern __shared__ __align__(16) uint16_t memory[];
  uint16_t* bounds[2] = {memory, memory + Tile::kRows * Tile::kStride};  // greatest, least keys
  const PageRows<Element, kDim> streamed(memory + 2 * Tile::kRows * Tile::kStride);
  const LookupParams& p = call.token;
  const PlainPair own(call, 0, static_cast<int>(blockIdx.x) / page_tiles);
  const auto first = static_cast<uint32_t>(blockIdx.x % page_tiles * Tile::kRows);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const char* greatest = static_cast<const char*>(p.level[0].greatest) +
                         (own.centroids - static_cast<const char*>(p.level[0].centroids));
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const char* from = part == 0 ? greatest : own.centroids;
    fetch_rows<kDim, Tile::kRows>(
        [&](int r) { return from + int64_t{min(first + r, own.count - 1)} * kDim * 2; },
        bounds[part]);
  }
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  const bool any = call.policy == PrefillGroup::kAny;
  const bool wide = !any || p.q_dtype != p.dtype;
  const int rows = any ? own.tokens * p.group : mean_rows(call);
  const float* means = call.parts + static_cast<int64_t>(own.pair) * rows * 2 * kDim;
  float score[2] = {-INFINITY, -INFINITY};
  bool sound = true;
#pragma unroll 1
  for (int tile = 0; tile < rows; tile += kPageStream) {
    __syncthreads();  // the tile before has been read
    streamed.load(rows - tile, [&](int r, int chunk, bool positive, float(&x)[8]) {
      if (any) {
        const int64_t row = own.row_of(p, (tile + r) / p.group, (tile + r) % p.group);
        load_8(p.q_dtype, p.q, row * kDim + chunk * 8, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = part_of(x[i], positive);
      } else {
        load_8(DType::kF32, means, ((tile + r) * 2 + !positive) * kDim + chunk * 8, x);
      }
    });
    __syncthreads();
    float d[kTiles][4] = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint16_t* pages = bounds[part] + warp * 16 * Tile::kStride;
      add_product<Element, kDim, kTiles>(pages, streamed.high[part], d);
      if (wide) add_product<Element, kDim, kTiles>(pages, streamed.low[part], d);
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const float bound = d[i / 4][i % 4];
      if (tile + i / 4 * 8 + 2 * (lane % 4) + i % 2 >= rows) continue;
      sound = sound && fabsf(bound) <= FLT_MAX;
      score[i % 4 / 2] = fmaxf(score[i % 4 / 2], bound);
    }
  }
  if (!sound) call.faults[own.pair] = 1;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
      score[row] = fmaxf(score[row], __shfl_xor_sync(~0u, score[row], step));
    }
    const uint32_t page = first + warp * 16 + 8 * row + lane / 4;
    if (page < own.count && lane % 4 == 0) call.scores[own.pair * p.width + page] = score[row];
  }
}

}  // namespace sqz::cuda
