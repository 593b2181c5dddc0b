// One level of a lookup: denominators of the query rows (rows stay, centroids stream past), then
// scores of the clusters (centroids stay, rows stream past). Logits are worked out twice instead of
// being kept: a block has more of them than a memory pass is worth.
#pragma once

#include "libruntime/kernels/cuda/common/scores.cuh"
#include "libruntime/kernels/cuda/prefill/common/dependent.cuh"
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

// Where a kernel's rows are in shared memory: those that stay, with what rounding left of them, and
// two tiles of those that stream past, of which one is on its way.
template <int kDim, int kTiles>
struct Sm80Rows {
  using Tile = Sm80Tile<kDim, kTiles>;
  static constexpr int kStayWords = Tile::kRows * Tile::kStride;
  static constexpr int kStreamWords = Tile::kStream * Tile::kStride;
  uint16_t *stay, *stream;

  __device__ explicit Sm80Rows(uint16_t* memory, int stay_parts)
      : stay(memory), stream(memory + stay_parts * kStayWords) {}
  // The warp's rows.
  __device__ const uint16_t* own(int part = 0) const {
    return stay + part * kStayWords + threadIdx.x / 32 * Tile::kWarpRows * Tile::kStride;
  }
};

template <class Element, int kDim, int kTiles>
__global__ void __launch_bounds__(Sm80Tile<kDim, kTiles>::kThreads, Sm80Tile<kDim, kTiles>::kBlocks)
    sm80_sums_kernel(const __grid_constant__ PrefillLookupParams call, int row_tiles) {
  using Rows = Sm80Rows<kDim, kTiles>;
  using Tile = typename Rows::Tile;
  constexpr int kStreamed = Tile::kStream / 8;
  extern __shared__ __align__(16) uint16_t memory[];
  __shared__ float log_sizes[2][Tile::kStream];
  const PrefillShape& p = call.shape;
  prefill::begin_dependent();
  const int item = static_cast<int>(blockIdx.x), parts = call.row_plan.pieces;
  const int part = item % parts;
  const int first = item / parts % row_tiles * Tile::kRows;
  const Sm80Pair own(call, item / parts / row_tiles);
  const int count = own.tokens * p.group;
  if (first >= count) return;
  const bool wide = kTiles == 1 && call.q_dtype != p.dtype;
  const Rows rows(memory, wide ? 2 : 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  load_query_rows<Element, kDim, Tile::kRows, Tile::kThreads>(
      call.queries, call.q_dtype, p.dtype,
      [&](int r) -> int64_t {
        r += first;
        return r < count ? own.row_of(p, r / p.group, r % p.group) * kDim : -1;
      },
      rows.stay, rows.stay + Rows::kStayWords);
  const auto begin = static_cast<uint32_t>(int64_t{own.count} * part / parts);
  const auto end = static_cast<uint32_t>(int64_t{own.count} * (part + 1) / parts);
  const auto fetch = [&](uint32_t tile, int stage) {
    fetch_rows<kDim, Tile::kStream, Tile::kThreads>(
        [&](int r) {
          return own.centroids + int64_t{own.cluster(min(tile + r, end - 1))} * kDim * 2;
        },
        rows.stream + stage * Rows::kStreamWords);
    ptx::cp_async_commit_group();
    if (threadIdx.x >= Tile::kStream) return;
    const uint32_t j = tile + threadIdx.x;
    log_sizes[stage][threadIdx.x] = j < end ? log2f(static_cast<float>(own.sizes[j])) : -INFINITY;
  };
  float maximum[2 * kTiles], sum[2 * kTiles] = {};
#pragma unroll
  for (float& most : maximum) most = kLowestLogit;
  if (begin < end) fetch(begin, 0);
  int stage = 0;
#pragma unroll 1
  for (uint32_t tile = begin; tile < end; tile += Tile::kStream, stage ^= 1) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // the tile before has been read, too
    if (tile + Tile::kStream < end) fetch(tile + Tile::kStream, stage ^ 1);
    const uint16_t* streamed = rows.stream + stage * Rows::kStreamWords;
    float d[kTiles][kStreamed][4] = {};
    add_product<Element, kDim>(rows.own(), streamed, d);
    if (wide) add_product<Element, kDim>(rows.own(1), streamed, d);
#pragma unroll
    for (int i = 0; i < 2 * kStreamed; ++i) {
      const float log_size = log_sizes[stage][i / 2 * 8 + 2 * (lane % 4) + i % 2];
#pragma unroll
      for (int m = 0; m < 2 * kTiles; ++m) {
        float& x = d[m / 2][i / 2][m % 2 * 2 + i % 2];
        x = log_size > -INFINITY ? sound(x * call.scale) + log_size : -INFINITY;
      }
    }
    add_exponentials(d, maximum, sum);
  }
#pragma unroll
  for (int m = 0; m < 2 * kTiles; ++m) {
    add_sums_of_lanes(maximum[m], sum[m]);
    const int r = first + warp * Tile::kWarpRows + 8 * m + lane / 4;
    if (r >= count || lane % 4 != 0) continue;
    const int64_t queries = int64_t{call.blocks.tokens} * p.kv_heads * p.group;
    call.row_states[part * queries + own.row_of(p, r / p.group, r % p.group)] =
        make_float2(maximum[m], sum[m]);
  }
}

template <class Element, int kDim, int kTiles>
__global__ void __launch_bounds__(Sm80Tile<kDim, kTiles>::kThreads, Sm80Tile<kDim, kTiles>::kBlocks)
    sm80_scores_kernel(const __grid_constant__ PrefillLookupParams call, int cluster_tiles) {
  using Rows = Sm80Rows<kDim, kTiles>;
  using Tile = typename Rows::Tile;
  constexpr int kStreamed = Tile::kStream / 8;
  extern __shared__ __align__(16) uint16_t memory[];
  __shared__ float lse[2][Tile::kStream];
  __shared__ int64_t query_rows[2][Tile::kStream];  // of q; below 0: none
  const PrefillShape& p = call.shape;
  prefill::begin_dependent();
  const Sm80Pair own(call, static_cast<int>(blockIdx.x) / cluster_tiles);
  const auto first = static_cast<uint32_t>(blockIdx.x % cluster_tiles * Tile::kRows);
  if (first >= own.count || call.chosen.totals[own.pair].fault != 0) return;
  const bool wide = kTiles == 1 && call.q_dtype != p.dtype;
  const Rows rows(memory, 1);
  const int stream_words = (wide ? 2 : 1) * Rows::kStreamWords;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  fetch_rows<kDim, Tile::kRows, Tile::kThreads>(
      [&](int r) {
        return own.centroids + int64_t{own.cluster(min(first + r, own.count - 1))} * kDim * 2;
      },
      rows.stay);
  // Rows are located a tile before they are fetched.
  const int count = own.tokens * p.group, tiles = (count + Tile::kStream - 1) / Tile::kStream;
  const auto locate = [&](int tile) {
    if (threadIdx.x >= Tile::kStream || tile >= tiles) return;
    const int r = tile * Tile::kStream + static_cast<int>(threadIdx.x);
    query_rows[tile % 2][threadIdx.x] = r < count ? own.row_of(p, r / p.group, r % p.group) : -1;
  };
  const auto fetch = [&](int tile) {
    if (tile >= tiles) return;
    const int64_t* from = query_rows[tile % 2];
    uint16_t* high = rows.stream + tile % 2 * stream_words;
    load_query_rows<Element, kDim, Tile::kStream, Tile::kThreads>(
        call.queries, call.q_dtype, p.dtype,
        [&](int r) { return from[r] < 0 ? -1 : from[r] * kDim; }, high, high + Rows::kStreamWords);
    ptx::cp_async_commit_group();
    if (threadIdx.x >= Tile::kStream) return;
    const int64_t row = from[threadIdx.x];
    lse[tile % 2][threadIdx.x] = row < 0 ? INFINITY : call.lse[row];
  };
  locate(0);
  locate(1);
  __syncthreads();
  fetch(0);
  float maximum[2 * kTiles], sum[2 * kTiles] = {};
#pragma unroll
  for (float& most : maximum) most = kLowestLogit;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // the tile before has been read, too
    fetch(tile + 1);
    locate(tile + 2);
    const uint16_t* high = rows.stream + tile % 2 * stream_words;
    float d[kTiles][kStreamed][4] = {};
    add_product<Element, kDim>(rows.own(), high, d);
    if (wide) add_product<Element, kDim>(rows.own(), high + Rows::kStreamWords, d);
#pragma unroll
    for (int i = 0; i < 2 * kStreamed; ++i) {
      const float own_lse = lse[tile % 2][i / 2 * 8 + 2 * (lane % 4) + i % 2];
#pragma unroll
      for (int m = 0; m < 2 * kTiles; ++m) {
        float& y = d[m / 2][i / 2][m % 2 * 2 + i % 2];
        y = fmaf(y, call.scale, -own_lse);
      }
    }
    add_exponentials(d, maximum, sum);
  }
  const float log_count = log2f(static_cast<float>(count));
#pragma unroll
  for (int m = 0; m < 2 * kTiles; ++m) {
    add_sums_of_lanes(maximum[m], sum[m]);
    const uint32_t j = first + warp * Tile::kWarpRows + 8 * m + lane / 4;
    if (j >= own.count || lane % 4 != 0) continue;
    call.columns[int64_t{own.pair} * call.level.clusters + j] =
        maximum[m] + log2f(sum[m]) - log_count;
  }
}

}  // namespace sqz::cuda
