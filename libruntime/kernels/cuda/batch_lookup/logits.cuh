// Logits of one level: query rows stay in shared memory, tiles of centroids stream past.
#pragma once

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/batch_lookup/list.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"
#include "libruntime/kernels/cuda/prefill_sm80/tiles.cuh"

namespace sqz::cuda {

template <class Element, int kDim>
__global__ void __launch_bounds__(Sm80Tile<kDim>::kThreads)
    batch_logits_kernel(const __grid_constant__ BatchLookup call, int k, int row_tiles, int parts) {
  using Tile = Sm80Tile<kDim>;
  constexpr int kTiles = Tile::kStream / 8;
  extern __shared__ __align__(16) uint16_t memory[];
  __shared__ float log_sizes[Tile::kStream];
  __shared__ uint32_t alive[Tile::kStream];
  constexpr int kBuffer = Tile::kStream * Tile::kStride;
  uint16_t* high = memory + 2 * kBuffer;
  uint16_t* low = high + Tile::kRows * Tile::kStride;
  const LookupParams& p = call.lookup;
  const LookupLevel& level = p.level[k];
  const int item = static_cast<int>(blockIdx.x), part = item % parts;
  const int first = item / parts % row_tiles * Tile::kRows;
  const BatchList own(call, item / parts / row_tiles);
  const bool wide = p.q_dtype != p.dtype;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t skip = static_cast<int64_t>(own.head) * level.clusters;
  const auto* rows = static_cast<const char*>(level.centroids) + skip * kDim * 2;
  const int tiles = (level.clusters + Tile::kStream - 1) / Tile::kStream;
  const int begin = tiles * part / parts * Tile::kStream;
  const int end = min(tiles * (part + 1) / parts * Tile::kStream, level.clusters);
  // A group of copies in any case.
  const auto fetch = [&](int tile) {
    uint16_t* to = memory + (tile - begin) / Tile::kStream % 2 * kBuffer;
    if (tile < end) {
      fetch_rows<kDim, Tile::kStream>(
          [&](int r) { return rows + int64_t{min(tile + r, end - 1)} * kDim * 2; }, to);
    }
    ptx::cp_async_commit_group();
  };
  if (first < own.rows) fetch(begin);  // no earlier kernel writes centroids
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (call.history != nullptr) {
    const bool whole = (k == 0 ? call.history->next : call.history->whole) != 0;
    if (k == 0 && blockIdx.x == 0 && threadIdx.x == 0) call.history->whole = whole ? 1 : 0;
    if (whole) {
      ptx::cp_async_wait_group<0>();
      return;
    }
  }
  // Of the kernel that comes next: nothing is counted yet.
  if (first == 0 && k + 1 == p.levels) {
    const int choosing = call.choose_tiles(k);
    for (int i = part * Tile::kThreads + static_cast<int>(threadIdx.x); i < choosing;
         i += parts * Tile::kThreads) {
      call.counts[int64_t{own.list} * choosing + i] = 0;
    }
  }
  if (first >= own.rows) return;
  const uint32_t* words = k == 0 ? nullptr : own.words(call, k);
  const auto query_at = [&](int r) -> int64_t {
    return first + r < own.rows ? own.query(call, first + r) * kDim : -1;
  };
  if (wide) {
    load_query_rows<Element, kDim, Tile::kRows>(p.q, p.q_dtype, p.dtype, query_at, high, low);
  } else {
#pragma unroll
    for (int i = threadIdx.x; i < Tile::kRows * Tile::kChunks; i += Tile::kThreads) {
      const int r = i / Tile::kChunks, chunk = i % Tile::kChunks;
      const int64_t from = query_at(r);
      ptx::cp_async_16(ptx::shared_address(high + r * Tile::kStride + chunk * 8),
                       static_cast<const uint16_t*>(p.q) + max(from, int64_t{0}) + chunk * 8,
                       from < 0 ? 0 : 16);
    }
    ptx::cp_async_commit_group();
  }
  int row[2], request[2];  // of this lane
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row[half] = first + warp * 16 + 8 * half + lane / 4;
    request[half] = min(row[half] / p.group, 31);
  }
  float maximum[2] = {kLowestLogit, kLowestLogit}, sum[2] = {};
#pragma unroll 1
  for (int tile = begin; tile < end; tile += Tile::kStream) {
    fetch(tile + Tile::kStream);
    if (threadIdx.x < Tile::kStream) {
      const int j = tile + static_cast<int>(threadIdx.x);
      const float log_size = j < end ? level.log_sizes[skip + j] : -INFINITY;
      log_sizes[threadIdx.x] = log_size * 1.4426950408889634f;
      alive[threadIdx.x] = j < end && words != nullptr ? words[j] : 0;
    }
    ptx::cp_async_wait_group<1>();  // all but the next tile
    __syncthreads();
    const uint16_t* centroids = memory + (tile - begin) / Tile::kStream % 2 * kBuffer;
    float d[kTiles][4] = {};
    add_product<Element, kDim, kTiles>(high + warp * 16 * Tile::kStride, centroids, d);
    if (wide) add_product<Element, kDim, kTiles>(low + warp * 16 * Tile::kStride, centroids, d);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int at = t * 8 + 2 * (lane % 4);
        float(&x)[2] = *reinterpret_cast<float(*)[2]>(&d[t][2 * half]);
        x[0] *= p.scale;
        x[1] *= p.scale;
        if (row[half] < own.rows) {
          *reinterpret_cast<float2*>(call.logits + own.row(call, row[half]) * call.stride + tile +
                                     at) = make_float2(x[0], x[1]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) x[i] += log_sizes[at + i];
      }
      if (words != nullptr) {
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) {
          const uint32_t word = alive[i / 2 * 8 + 2 * (lane % 4) + i % 2];
          if ((word >> request[half] & 1) == 0) d[i / 2][2 * half + i % 2] = -INFINITY;
        }
      }
      add_exponentials(d, half, maximum[half], sum[half]);
    }
    __syncthreads();  // the tile has been read
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    add_sums_of_lanes(maximum[half], sum[half]);
    if (row[half] >= own.rows || lane % 4 != 0) continue;
    call.sums[own.row(call, row[half]) * kBatchParts + part] =
        make_float2(maximum[half], sum[half]);
  }
}

// `parts`: of the level's clusters.
template <int kDim>
Status launch_batch_logits(const BatchLookup& call, int level, int parts, cudaStream_t stream) {
  using Tile = Sm80Tile<kDim>;
  const LookupParams& p = call.lookup;
  const bool wide = p.q_dtype != p.dtype;
  constexpr int kWideRows = 2 * (Tile::kRows + Tile::kStream);
  static_assert(kWideRows * Tile::kStride * 2 <= kLeastBlockShared);
  const int rows = wide ? kWideRows : Tile::kRows + 2 * Tile::kStream;
  const int row_tiles = (call.chunk * p.group + Tile::kRows - 1) / Tile::kRows;
  auto* kernel =
      p.dtype == DType::kBF16 ? batch_logits_kernel<Bf16, kDim> : batch_logits_kernel<F16, kDim>;
  return launch_blocks(kernel, call.lists() * row_tiles * parts, Tile::kThreads,
                       int64_t{rows} * Tile::kStride * 2, p.device, stream, call, level, row_tiles,
                       parts);
}

}  // namespace sqz::cuda
