// One level of a lookup: denominators of the query rows (rows stay, centroids stream past), then
// scores of the clusters (centroids stay, rows stream past). Logits are worked out twice instead of
// being kept: a block has more of them than a memory pass is worth.
#pragma once

#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"
#include "libruntime/kernels/cuda/prefill_sm80/kernel.h"
#include "libruntime/kernels/cuda/prefill_sm80/tiles.cuh"

namespace sqz::cuda {

// A block of queries and a KV head, as both kernels see it.
struct Sm80Pair {
  int pair, head, tokens;
  int64_t first_row;       // of q: the block's first token, the first head of the group
  uint32_t count;          // clusters to score
  const uint32_t* alive;   // which; null = all
  const char* centroids;   // [n, d] of the head
  const float* log_sizes;  // [n]

  __device__ Sm80Pair(const Sm80Lookup& call, int level, int index)
      : pair(index), head(index % call.token.kv_heads) {
    const LookupParams& p = call.token;
    const int2 block = block_of(call.blocks, pair / p.kv_heads);
    tokens = block.y;
    first_row = (static_cast<int64_t>(block.x) * p.kv_heads + head) * p.group;
    const LookupLevel& from = p.level[level];
    count = level == 0 ? static_cast<uint32_t>(from.clusters) : call.state[pair].x;
    alive = level == 0 ? nullptr
                       : p.alive + (static_cast<int64_t>(pair) * 2 + (level - 1) % 2) * p.width;
    const int64_t skip = static_cast<int64_t>(head) * from.clusters;
    centroids = static_cast<const char*>(from.centroids) + skip * p.dim * 2;
    log_sizes = from.log_sizes + skip;
  }

  __device__ uint32_t cluster(uint32_t j) const { return alive == nullptr ? j : alive[j]; }
  // Row of q, as of lse, of row r of the block: token r / group.
  __device__ int64_t row_of(const LookupParams& p, int token, int head_in_group) const {
    return first_row + static_cast<int64_t>(token) * p.kv_heads * p.group + head_in_group;
  }
};

template <class Element, int kDim>
__global__ void __launch_bounds__(Sm80Tile<kDim>::kThreads)
    sm80_sums_kernel(const __grid_constant__ Sm80Lookup call, int level, int row_tiles) {
  using Tile = Sm80Tile<kDim>;
  constexpr int kTiles = Tile::kStream / 8;
  extern __shared__ __align__(16) uint16_t memory[];
  __shared__ float log_sizes[Tile::kStream];
  uint16_t* centroids = memory;
  uint16_t* high = centroids + Tile::kStream * Tile::kStride;
  uint16_t* low = high + Tile::kRows * Tile::kStride;
  const LookupParams& p = call.token;
  const int item = static_cast<int>(blockIdx.x), part = item % kSm80Parts;
  const int first = item / kSm80Parts % row_tiles * Tile::kRows;
  const Sm80Pair own(call, level, item / kSm80Parts / row_tiles);
  const int rows = own.tokens * p.group;
  if (first >= rows) return;
  const bool wide = p.q_dtype != p.dtype;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  load_query_rows<Element, kDim, Tile::kRows>(
      p.q, p.q_dtype, p.dtype,
      [&](int r) -> int64_t {
        r += first;
        return r < rows ? own.row_of(p, r / p.group, r % p.group) * kDim : -1;
      },
      high, low);
  const auto begin = static_cast<uint32_t>(int64_t{own.count} * part / kSm80Parts);
  const auto end = static_cast<uint32_t>(int64_t{own.count} * (part + 1) / kSm80Parts);
  float maximum[2] = {kLowestLogit, kLowestLogit}, sum[2] = {};
#pragma unroll 1
  for (uint32_t tile = begin; tile < end; tile += Tile::kStream) {
    __syncthreads();  // the tile before has been read
    fetch_rows<kDim, Tile::kStream>(
        [&](int r) {
          return own.centroids + int64_t{own.cluster(min(tile + r, end - 1))} * kDim * 2;
        },
        centroids);
    ptx::cp_async_commit_group();
    if (threadIdx.x < Tile::kStream) {
      const uint32_t j = tile + threadIdx.x;
      log_sizes[threadIdx.x] =
          j < end ? own.log_sizes[own.cluster(j)] * 1.4426950408889634f : -INFINITY;
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    float d[kTiles][4] = {};
    add_product<Element, kDim, kTiles>(high + warp * 16 * Tile::kStride, centroids, d);
    if (wide) add_product<Element, kDim, kTiles>(low + warp * 16 * Tile::kStride, centroids, d);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        float& x = d[i / 2][2 * row + i % 2];
        const float log_size = log_sizes[i / 2 * 8 + 2 * (lane % 4) + i % 2];
        x = log_size == -INFINITY ? -INFINITY : x * p.scale + log_size;
      }
      add_exponentials(d, row, maximum[row], sum[row]);
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    add_sums_of_lanes(maximum[row], sum[row]);
    const int r = first + warp * 16 + 8 * row + lane / 4;
    if (r >= rows || lane % 4 != 0) continue;
    call.sums[own.row_of(p, r / p.group, r % p.group) * kSm80Parts + part] =
        make_float2(maximum[row], sum[row]);
  }
}

template <class Element, int kDim>
__global__ void __launch_bounds__(Sm80Tile<kDim>::kThreads)
    sm80_scores_kernel(const __grid_constant__ Sm80Lookup call, int level, int cluster_tiles) {
  using Tile = Sm80Tile<kDim>;
  constexpr int kTiles = Tile::kStream / 8;
  extern __shared__ __align__(16) uint16_t memory[];
  __shared__ float lse[Tile::kStream];
  uint16_t* centroids = memory;
  uint16_t* high = centroids + Tile::kRows * Tile::kStride;
  uint16_t* low = high + Tile::kStream * Tile::kStride;
  const LookupParams& p = call.token;
  const Sm80Pair own(call, level, static_cast<int>(blockIdx.x) / cluster_tiles);
  const auto first = static_cast<uint32_t>(blockIdx.x % cluster_tiles * Tile::kRows);
  if (first >= own.count || call.faults[own.pair] != 0) return;
  const bool wide = p.q_dtype != p.dtype;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  fetch_rows<kDim, Tile::kRows>(
      [&](int r) {
        return own.centroids + int64_t{own.cluster(min(first + r, own.count - 1))} * kDim * 2;
      },
      centroids);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  // The policy `max` takes the mean over the tokens of one head after the other.
  const bool by_head = call.policy == PrefillGroup::kMax;
  const int passes = by_head ? p.group : 1, rows = by_head ? own.tokens : own.tokens * p.group;
  const auto row_of = [&](int r, int pass) {
    return by_head ? own.row_of(p, r, pass) : own.row_of(p, r / p.group, r % p.group);
  };
  float score[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    float maximum[2] = {kLowestLogit, kLowestLogit}, sum[2] = {};
#pragma unroll 1
    for (int tile = 0; tile < rows; tile += Tile::kStream) {
      __syncthreads();  // the tile before has been read
      load_query_rows<Element, kDim, Tile::kStream>(
          p.q, p.q_dtype, p.dtype,
          [&](int r) -> int64_t { return tile + r < rows ? row_of(tile + r, pass) * kDim : -1; },
          high, low);
      if (threadIdx.x < Tile::kStream) {
        const int r = tile + static_cast<int>(threadIdx.x);
        lse[threadIdx.x] = r < rows ? call.lse[row_of(r, pass)] : INFINITY;
      }
      __syncthreads();
      float d[kTiles][4] = {};
      add_product<Element, kDim, kTiles>(centroids + warp * 16 * Tile::kStride, high, d);
      if (wide) add_product<Element, kDim, kTiles>(centroids + warp * 16 * Tile::kStride, low, d);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) {
          float& y = d[i / 2][2 * row + i % 2];
          y = y * p.scale - lse[i / 2 * 8 + 2 * (lane % 4) + i % 2];
        }
        add_exponentials(d, row, maximum[row], sum[row]);
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      add_sums_of_lanes(maximum[row], sum[row]);
      const bool any = call.policy == PrefillGroup::kAny;
      const float mean = maximum[row] + log2f(sum[row]) - log2f(static_cast<float>(rows));
      if (sum[row] > 0) score[row] = fmaxf(score[row], any ? maximum[row] : mean);
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t j = first + warp * 16 + 8 * row + lane / 4;
    if (j >= own.count || lane % 4 != 0) continue;
    const bool empty = own.log_sizes[own.cluster(j)] == -INFINITY;
    call.scores[own.pair * p.width + j] = empty ? -INFINITY : score[row];
  }
}

}  // namespace sqz::cuda
