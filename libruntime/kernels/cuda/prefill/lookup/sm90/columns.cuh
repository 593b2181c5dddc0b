// The second pass of the prefill lookup, for Hopper: S of every cluster, summed over the queries of
// a block.
//
// Centroids are the rows of products and queries their columns, so that what is added up lies in
// the registers of one lane. A persistent block an SM holds the queries of a row tile in shared
// memory, in chunks; its consumer warpgroups take tiles of 64 centroids in turn and multiply each
// by one chunk after the other. Two warps fetch centroids, one takes items, one brings queries.
#pragma once

#include "libruntime/kernels/cuda/prefill/lookup/sm90/items.cuh"

namespace sqz::cuda::prefill {

// Sums over queries of 2^(x - lse), of centroids r and r + 8.
class ColumnSums {
 public:
  // lse: of the chunk, in the order of lse_place().
  __device__ __forceinline__ void add(const float (&logits)[kColumnRows / 2], const float* lse,
                                      float scale) {
    const float4* four = reinterpret_cast<const float4*>(lse) + (threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < kColumnRows / 8; j += 2) {
      const float4 shifts = four[2 * j];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* logit = logits + 4 * j + 2 * half;
        add(half, 0, logit[0], shifts.x, scale);
        add(half, 1, logit[1], shifts.y, scale);
        add(half, 0, logit[4], shifts.z, scale);
        add(half, 1, logit[5], shifts.w, scale);
      }
    }
  }

  // The sum of centroid r + 8 half, in the four lanes of its row.
  __device__ __forceinline__ float finish(int half) const {
    float sum = sums_[half][0] + sums_[half][1];
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }

 private:
  __device__ __forceinline__ void add(int half, int part, float logit, float shift, float scale) {
    sums_[half][part] += ptx::ex2_approx(fmaf(logit, scale, -shift));
  }

  float sums_[2][2] = {};
};

// Where the denominator of query `row` of a chunk lies: a lane reads those of four of its columns
// at once.
__device__ __forceinline__ int lse_place(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

// Chunks of queries of an item.
template <class Config>
__device__ __forceinline__ int chunks_of(const PrefillLookupParams& params,
                                         const LookupItem& item) {
  const int tokens = block_of(params.blocks, item.block).y;
  const int tiles = (tokens + params.chunks.tokens - 1) / params.chunks.tokens;
  return min(Config::kQueryChunks, tiles - item.tile * Config::kQueryChunks);
}

// Queries and their denominators; of a row that is no query +infinity, so that its S are 0.
template <class Config>
__device__ void fetch_query_chunks(ColumnStorage<Config>& shared, const PrefillLookupParams& params,
                                   const LookupMaps& maps) {
  const int lane = threadIdx.x & 31;
  const uint64_t policy = ptx::createpolicy_evict_last();
  const uint32_t bytes = params.chunks.heads * params.chunks.tokens * Config::kChunks * kRowBytes;
  ItemReader<ColumnStorage<Config>> items(shared);
  RingPosition<1> ring;
  LookupItem item;
  while (items.next(item)) {
    const int2 block = block_of(params.blocks, item.block);
    const int chunks = chunks_of<Config>(params, item);
    for (int c = 0; c < Config::kQueryChunks; ++c) {
      const int tile = item.tile * Config::kQueryChunks + c;
      float lse[kColumnRows / 32];
#pragma unroll
      for (int i = 0; i < kColumnRows / 32; ++i) {
        const int64_t query = query_index(params.chunks, block, item.kv_head, params.shape.kv_heads,
                                          params.shape.group, tile, lane + 32 * i);
        lse[i] = query < 0 ? INFINITY : params.lse[query];
      }
      ptx::mbarrier_wait_parity(&shared.queries_empty[c], ring.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kColumnRows / 32; ++i) shared.lse[c][lse_place(lane + 32 * i)] = lse[i];
      if (lane == 0 && c < chunks) {
        ptx::mbarrier_arrive_expect_tx(&shared.queries_full[c], bytes);
        for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
          ptx::cp_async_bulk_tensor_4d(shared.queries[c] + chunk * kColumnRows * kRowBytes,
                                       &maps.queries, chunk * (kRowBytes / 2), 0, item.kv_head,
                                       block.x + tile * params.chunks.tokens,
                                       &shared.queries_full[c], policy);
        }
      } else if (lane == 0) {
        ptx::mbarrier_arrive(&shared.queries_full[c]);
      }
      ptx::mbarrier_arrive_warp(&shared.queries_full[c]);
    }
    ring.advance();
  }
}

// Chunks [first, end) of the rows of centroids.
template <class Config>
__device__ void fetch_column_tiles(ColumnStorage<Config>& shared, const PrefillLookupParams& params,
                                   const LookupMaps& maps, int first, int end) {
  const uint64_t policy = ptx::createpolicy_evict_last();
  ItemReader<ColumnStorage<Config>> items(shared);
  RingPosition<Config::kStages> ring;
  LookupItem item;
  while (items.next(item)) {
    // Nobody waits for a warp that fetches nothing: it would fall behind by a round of the ring,
    // and then wait for a parity that never comes.
    if (first == end) continue;
    SegmentWindow window(clusters_of(params, item.list), item.begin);
    for (int32_t at = item.begin; at < item.end; at += kColumnTile, ring.advance()) {
      ptx::mbarrier_wait_parity(&shared.empty[ring.stage], ring.parity ^ 1);
      if (first == 0 && (threadIdx.x & 31) == 0) {
        ptx::mbarrier_arrive_expect_tx(&shared.full[ring.stage], Config::kTileBytes);
      }
      __syncwarp();
      fetch_tile<kColumnTile>(first, end, window, at, item.kv_head, maps.centroids, maps.centroids,
                              shared.centroids[ring.stage], &shared.full[ring.stage], policy);
    }
  }
}

template <class T, class Config>
__device__ void consume_columns(ColumnStorage<Config>& shared, const PrefillLookupParams& params,
                                uint32_t warpgroup) {
  constexpr uint32_t kTeams = Config::kWarpgroups;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int64_t lists = static_cast<int64_t>(params.blocks.count) * params.shape.kv_heads;
  const float scale = params.scale;
  ItemReader<ColumnStorage<Config>> items(shared);
  RingPosition<1> query_ring;
  LookupItem item;
  float logits[kColumnRows / 2];
  uint32_t before = 0;  // tiles of the items so far
  while (items.next(item)) {
    const uint32_t tiles = (item.end - item.begin + kColumnTile - 1) / kColumnTile;
    const int chunks = chunks_of<Config>(params, item);
    float* to = params.columns + (item.tile * lists + item.list) * params.level.clusters;
    // Every warpgroup waits for a chunk before it gives it back, used or not: none is ever so far
    // ahead that a parity could stand for two rounds.
    const auto wait_queries = [&](int c) {
      ptx::mbarrier_wait_parity(&shared.queries_full[c], query_ring.parity);
    };
    const auto release_queries = [&](int begin) {
      for (int c = begin; c < Config::kQueryChunks; ++c) {
        wait_queries(c);
        ptx::mbarrier_arrive_warp(&shared.queries_empty[c]);
      }
    };
    // Warpgroups take tiles in turn, from one item to the next.
    const uint32_t first = (warpgroup + kTeams - before % kTeams) % kTeams;
    if (first >= tiles) release_queries(0);
    for (uint32_t i = first; i < tiles; i += kTeams) {
      const bool last = i + kTeams >= tiles;
      const uint32_t stage = (before + i) % Config::kStages;
      ptx::mbarrier_wait_parity(&shared.full[stage], (before + i) / Config::kStages & 1);
      const uint64_t centroids = ptx::matrix_descriptor<kRowBytes>(shared.centroids[stage]);
      ColumnSums sums;
      for (int c = 0; c < chunks; ++c) {
        if (i == first) wait_queries(c);
        start_product<T, Config::kDim, kColumnTile, kColumnRows>(
            logits, centroids, ptx::matrix_descriptor<kRowBytes>(shared.queries[c]));
        ptx::wgmma_wait_group<0>();
        ptx::fence_registers(logits);
        sums.add(logits, shared.lse[c], scale);
        if (last) ptx::mbarrier_arrive_warp(&shared.queries_empty[c]);
      }
      ptx::mbarrier_arrive_warp(&shared.empty[stage]);
      if (last) release_queries(chunks);
      const int32_t at =
          item.begin + static_cast<int32_t>(i) * kColumnTile + 16 * warp + (lane >> 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = sums.finish(half);
        if ((lane & 3) == 0 && at + 8 * half < item.end) to[at + 8 * half] = sum;
      }
    }
    before += tiles;
    query_ring.advance();
  }
}

template <class T, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    columns_kernel(const __grid_constant__ PrefillLookupParams params,
                   const __grid_constant__ LookupMaps maps) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<ColumnStorage<Config>*>(bytes);
  if (threadIdx.x == 0) {
    constexpr uint32_t kConsumers = ptx::kWarpArrivals * 4 * Config::kWarpgroups;
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&shared.item_full[i], 1);
      ptx::mbarrier_init(&shared.item_empty[i], kConsumers + 3 * ptx::kWarpArrivals);
    }
    for (int c = 0; c < Config::kQueryChunks; ++c) {
      ptx::mbarrier_init(&shared.queries_full[c], 1 + ptx::kWarpArrivals);
      ptx::mbarrier_init(&shared.queries_empty[c], kConsumers);
    }
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], 4 * ptx::kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  clear_queries<Config::kThreads>(shared, params.chunks, kColumnRows);
  begin_dependent();
  __syncthreads();
  const int warpgroup = ptx::uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp < 2) {
      fetch_column_tiles(shared, params, maps, warp == 0 ? 0 : Config::kFirstChunks,
                         warp == 0 ? Config::kFirstChunks : Config::kChunks);
    } else if (warp == 2) {
      if (threadIdx.x == 64) {
        take_lookup_items(shared, params, params.column_plan, params.taken + 1);
      }
    } else {
      fetch_query_chunks(shared, params, maps);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume_columns<T, Config>(shared, params, warpgroup - 1);
  }
}

}  // namespace sqz::cuda::prefill
