// One level of a lookup: denominators of the query rows (rows stay, centroids stream past), then
// scores of the clusters (centroids stay, rows stream past). Logits are worked out twice instead of
// being kept: a block has more of them than a memory pass is worth.
#pragma once

#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/common/scores.cuh"
#include "libruntime/kernels/cuda/prefill/common/sm80_tile.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/kernel.h"

namespace sqz::cuda {

// A block of queries and a KV head, as both kernels see it.
struct Sm80Pair {
  int pair, head, tokens;
  int64_t first_row;      // of q: the block's first token, the first head of the group
  uint32_t count;         // clusters to score
  const uint32_t* ids;    // which; null = all
  const uint32_t* sizes;  // of these; null: of pages
  const char* centroids;  // [n, d] of the head

  __device__ Sm80Pair(const PrefillLookupParams& params, int index)
      : pair(index), head(index % params.shape.kv_heads) {
    const PrefillShape& shape = params.shape;
    const int2 block = block_of(params.blocks, pair / shape.kv_heads);
    tokens = block.y;
    first_row = (static_cast<int64_t>(block.x) * shape.kv_heads + head) * shape.group;
    count = static_cast<uint32_t>(alive_clusters(params, pair));
    const bool all = params.alive.totals == nullptr;
    const int64_t n = params.level.clusters;
    ids = all ? nullptr : params.ids + pair * n;
    sizes = all ? params.level.sizes + head * n : params.alive_sizes + pair * n;
    centroids = static_cast<const char*>(params.level.centroids) + head * n * shape.dim * 2;
  }

  __device__ uint32_t cluster(uint32_t j) const { return ids == nullptr ? j : ids[j]; }
  // Row of q, as of lse, of row r of the block: token r / group.
  __device__ int64_t row_of(const PrefillShape& shape, int token, int head_in_group) const {
    return first_row + static_cast<int64_t>(token) * shape.kv_heads * shape.group + head_in_group;
  }
};

// Rows that stay against rows that stream past, of which two tiles are in shared memory and one is
// on its way. With kScores centroids stay, queries stream past, and clusters get scores; else it is
// the other way round, and queries get the states of a part of the clusters. `tiles`: of the rows
// that stay, of a pair.
template <class Element, int kDim, int kTiles, bool kScores>
__global__ void __launch_bounds__(Sm80Tile<kDim, kTiles>::kThreads, Sm80Tile<kDim, kTiles>::kBlocks)
    sm80_pass_kernel(const __grid_constant__ PrefillLookupParams call, int tiles) {
  using Tile = Sm80Tile<kDim, kTiles>;
  constexpr int kStreamed = Tile::kStream / 8;
  constexpr int kStayWords = Tile::kRows * Tile::kStride;
  constexpr int kStreamWords = Tile::kStream * Tile::kStride;
  extern __shared__ __align__(16) uint16_t memory[];
  // Each row that streams past has here log2 of its size, or of 1 / denominator; -infinity if there
  // is none. Rows of q are located a tile before they are fetched.
  __shared__ float added[2][Tile::kStream];
  __shared__ int64_t query_rows[2][kScores ? Tile::kStream : 1];
  const PrefillShape& p = call.shape;
  begin_dependent();
  const int item = static_cast<int>(blockIdx.x), parts = kScores ? 1 : call.row_plan.pieces;
  const int part = item % parts, first = item / parts % tiles * Tile::kRows;
  const Sm80Pair own(call, item / parts / tiles);
  const int queries = own.tokens * p.group, clusters = static_cast<int>(own.count);
  const int count = kScores ? clusters : queries;
  if (first >= count || (kScores && call.chosen.totals[own.pair].fault != 0)) return;
  const bool wide = kTiles == 1 && call.q_dtype != p.dtype;  // queries in two parts
  uint16_t* stream = memory + (wide && !kScores ? 2 : 1) * kStayWords;
  const int stage_words = (wide && kScores ? 2 : 1) * kStreamWords;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto centroid = [&](int j, int end) {
    return own.centroids + int64_t{own.cluster(min(j, end - 1))} * kDim * 2;
  };
  const auto query = [&](int r) -> int64_t {
    return r < queries ? own.row_of(p, r / p.group, r % p.group) : -1;
  };
  if constexpr (kScores) {
    fetch_rows<kDim, Tile::kRows, Tile::kThreads>([&](int r) { return centroid(first + r, count); },
                                                  memory);
  } else {
    load_query_rows<Element, kDim, Tile::kRows, Tile::kThreads>(
        call.queries, call.q_dtype, p.dtype, [&](int r) { return query(first + r) * kDim; }, memory,
        memory + kStayWords);
  }
  const auto streamed = int64_t{kScores ? queries : clusters};
  const auto begin = static_cast<int>(streamed * part / parts);
  const auto end = static_cast<int>(streamed * (part + 1) / parts);
  const auto locate = [&](int at, int stage) {
    if (kScores && threadIdx.x < Tile::kStream) {
      query_rows[stage][threadIdx.x] = query(at + static_cast<int>(threadIdx.x));
    }
  };
  const auto fetch = [&](int at, int stage) {
    if (at >= end) return;
    uint16_t* to = stream + stage * stage_words;
    const int j = at + static_cast<int>(threadIdx.x);
    if constexpr (kScores) {
      const int64_t* from = query_rows[stage];
      load_query_rows<Element, kDim, Tile::kStream, Tile::kThreads>(
          call.queries, call.q_dtype, p.dtype, [&](int r) { return from[r] * kDim; }, to,
          to + kStreamWords);
      ptx::cp_async_commit_group();
      if (threadIdx.x >= Tile::kStream) return;
      const int64_t row = from[threadIdx.x];
      added[stage][threadIdx.x] = row < 0 ? -INFINITY : -call.lse[row];
    } else {
      fetch_rows<kDim, Tile::kStream, Tile::kThreads>([&](int r) { return centroid(at + r, end); },
                                                      to);
      ptx::cp_async_commit_group();
      if (threadIdx.x >= Tile::kStream) return;
      added[stage][threadIdx.x] = j < end ? log2f(static_cast<float>(own.sizes[j])) : -INFINITY;
    }
  };
  locate(begin, 0);
  locate(begin + Tile::kStream, 1);
  if (kScores) __syncthreads();
  fetch(begin, 0);
  float maximum[2 * kTiles], sum[2 * kTiles] = {};
#pragma unroll
  for (float& most : maximum) most = kLowestLogit;
  const uint16_t* stay = memory + warp * Tile::kWarpRows * Tile::kStride;
  int stage = 0;
#pragma unroll 1
  for (int at = begin; at < end; at += Tile::kStream, stage ^= 1) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // the tile before has been read, too
    fetch(at + Tile::kStream, stage ^ 1);
    locate(at + 2 * Tile::kStream, stage);
    const uint16_t* rows = stream + stage * stage_words;
    float d[kTiles][kStreamed][4] = {};
    add_product<Element, kDim>(stay, rows, d);
    if (wide) {
      add_product<Element, kDim>(stay + (kScores ? 0 : kStayWords),
                                 rows + (kScores ? kStreamWords : 0), d);
    }
#pragma unroll
    for (int i = 0; i < 2 * kStreamed; ++i) {
      const float more = added[stage][i / 2 * 8 + 2 * (lane % 4) + i % 2];
#pragma unroll
      for (int m = 0; m < 2 * kTiles; ++m) {
        float& x = d[m / 2][i / 2][m % 2 * 2 + i % 2];
        if constexpr (kScores) {
          x = fmaf(x, call.scale, more);
        } else {
          x = more > -INFINITY ? sound(x * call.scale) + more : -INFINITY;
        }
      }
    }
    add_exponentials(d, maximum, sum);
  }
#pragma unroll
  for (int m = 0; m < 2 * kTiles; ++m) {
    add_sums_of_lanes(maximum[m], sum[m]);
    const int r = first + warp * Tile::kWarpRows + 8 * m + lane / 4;
    if (r >= count || lane % 4 != 0) continue;
    if constexpr (kScores) {
      call.columns[int64_t{own.pair} * call.level.clusters + r] =
          maximum[m] + log2f(sum[m]) - log2f(static_cast<float>(queries));
    } else {
      const int64_t all = int64_t{call.blocks.tokens} * p.kv_heads * p.group;
      call.row_states[part * all + query(r)] = make_float2(maximum[m], sum[m]);
    }
  }
}

}  // namespace sqz::cuda
