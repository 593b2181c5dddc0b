// The first pass of the prefill lookup, for Hopper: the denominator of every query row.
//
// A persistent block an SM takes items of 256 query rows and up to kPieceTiles tiles of centroids.
// One warp takes items, one fetches queries and centroids, one fetches more of these and sizes of
// clusters; four consumer warpgroups multiply 64 query rows each. While one of them adds up
// exponentials the others' products run.
#pragma once

#include "libruntime/kernels/cuda/prefill/lookup/sm90/epilogue.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/sm90/items.cuh"

namespace sqz::cuda::prefill {

template <class Config>
__device__ void fetch_centroids(RowSumStorage<Config>& shared, const PrefillLookupParams& params,
                                const LookupMaps& maps) {
  const bool leader = (threadIdx.x & 31) == 0;
  const uint64_t often = ptx::createpolicy_evict_last();
  const uint32_t query_bytes =
      params.tiles.heads * params.tiles.tokens * Config::kChunks * kRowBytes;
  ItemReader<RowSumStorage<Config>> items(shared);
  RingPosition<Config::kStages> ring;
  RingPosition<Config::kQueryStages> queries;
  LookupItem item;
  while (items.next(item)) {
    ptx::mbarrier_wait_parity(&shared.queries_empty[queries.stage], queries.parity ^ 1);
    if (leader) {
      const int2 block = block_of(params.blocks, item.block);
      ptx::mbarrier_arrive_expect_tx(&shared.queries_full[queries.stage], query_bytes);
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        ptx::cp_async_bulk_tensor_4d(
            shared.queries[queries.stage] + chunk * kLookupRows * kRowBytes, &maps.queries,
            chunk * (kRowBytes / 2), 0, item.kv_head, block.x + item.tile * params.tiles.tokens,
            &shared.queries_full[queries.stage], often);
      }
    }
    queries.advance();
    SegmentWindow window(clusters_of(params, item.list), item.begin);
    for (int32_t at = item.begin; at < item.end; at += Config::kTile, ring.advance()) {
      ptx::mbarrier_wait_parity(&shared.empty[ring.stage], ring.parity ^ 1);
      if (leader) ptx::mbarrier_arrive_expect_tx(&shared.full[ring.stage], Config::kTileBytes);
      __syncwarp();
      fetch_tile<Config::kTile>(0, Config::kFirstChunks, window, at, item.kv_head, maps.centroids,
                                maps.centroids, shared.centroids[ring.stage],
                                &shared.full[ring.stage], often);
    }
  }
}

// The other chunks of a tile of centroids.
template <class Config>
__device__ __forceinline__ void fetch_rest(RowSumStorage<Config>& shared, const LookupMaps& maps,
                                           SegmentWindow& window, const LookupItem& item,
                                           int32_t at, int stage) {
  if constexpr (Config::kFirstChunks < Config::kChunks) {
    fetch_tile<Config::kTile>(Config::kFirstChunks, Config::kChunks, window, at, item.kv_head,
                              maps.centroids, maps.centroids, shared.centroids[stage],
                              &shared.full[stage], ptx::createpolicy_evict_last());
  }
}

// The other chunks, and the sizes of each tile's clusters.
template <class Config>
__device__ void fetch_sizes(RowSumStorage<Config>& shared, const PrefillLookupParams& params,
                            const LookupMaps& maps) {
  constexpr int kTile = Config::kTile;
  const int lane = threadIdx.x & 31;
  ItemReader<RowSumStorage<Config>> items(shared);
  RingPosition<Config::kStages> ring;
  LookupItem item;
  while (items.next(item)) {
    const bool all = params.alive.totals == nullptr;
    const uint32_t* sizes =
        all ? params.level.sizes + static_cast<int64_t>(item.kv_head) * params.level.clusters
            : params.alive_sizes + static_cast<int64_t>(item.list) * params.level.clusters;
    SegmentWindow window(clusters_of(params, item.list), item.begin);
    for (int32_t at = item.begin; at < item.end; at += kTile, ring.advance()) {
      float mine[kTile / 32];
#pragma unroll
      for (int i = 0; i < kTile / 32; ++i) {
        const int32_t position = at + lane + 32 * i;
        mine[i] = position < item.end ? static_cast<float>(sizes[position]) : 0.0f;
      }
      ptx::mbarrier_wait_parity(&shared.empty[ring.stage], ring.parity ^ 1);
      fetch_rest(shared, maps, window, item, at, ring.stage);
#pragma unroll
      for (int i = 0; i < kTile / 32; ++i) {
        shared.sizes[ring.stage][lane + 32 * i] = mine[i];
      }
      ptx::mbarrier_arrive_warp(&shared.full[ring.stage]);
    }
  }
}

template <class T, class Config>
__device__ void consume_rows(RowSumStorage<Config>& shared, const PrefillLookupParams& params,
                             int warpgroup) {
  constexpr int kTile = Config::kTile;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int first_row = 64 * warpgroup + 16 * warp + (lane >> 2);  // of this lane; and + 8
  const float scale = params.scale;
  ItemReader<RowSumStorage<Config>> items(shared);
  RingPosition<Config::kStages> ring;
  RingPosition<Config::kQueryStages> query_ring;
  LookupItem item;
  float logits[kTile / 2];
  while (items.next(item)) {
    ptx::mbarrier_wait_parity(&shared.queries_full[query_ring.stage], query_ring.parity);
    const uint64_t queries = ptx::matrix_descriptor<kRowBytes>(shared.queries[query_ring.stage] +
                                                               64 * warpgroup * kRowBytes);
    RowSums sums;
    for (int32_t at = item.begin; at < item.end; at += kTile, ring.advance()) {
      ptx::mbarrier_wait_parity(&shared.full[ring.stage], ring.parity);
      start_product<T, Config::kDim, kLookupRows, kTile>(
          logits, queries, ptx::matrix_descriptor<kRowBytes>(shared.centroids[ring.stage]));
      ptx::wgmma_wait_group<0>();
      ptx::fence_registers(logits);
      sums.add<kTile>(logits, shared.sizes[ring.stage], scale);
      ptx::mbarrier_arrive_warp(&shared.empty[ring.stage]);
    }
    bool beyond[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      beyond[half] = is_row_beyond<T, Config::kChunks, kLookupRows>(
          shared.queries[query_ring.stage], first_row + 8 * half, scale);
    }
    ptx::mbarrier_arrive_warp(&shared.queries_empty[query_ring.stage]);
    query_ring.advance();
    const int2 block = block_of(params.blocks, item.block);
    const int64_t queries_of_call =
        static_cast<int64_t>(params.blocks.tokens) * params.shape.kv_heads * params.shape.group;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 state = sums.finish(half);
      if (beyond[half]) state.y = NAN;
      const int64_t query = query_index(params.tiles, block, item.kv_head, params.shape.kv_heads,
                                        params.shape.group, item.tile, first_row + 8 * half);
      if ((lane & 3) == 0 && query >= 0) {
        params.row_states[item.piece * queries_of_call + query] = state;
      }
    }
  }
}

template <class T, class Config>
__global__ void __launch_bounds__(kRowSumThreads, 1)
    row_sums_kernel(const __grid_constant__ PrefillLookupParams params,
                    const __grid_constant__ LookupMaps maps) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<RowSumStorage<Config>*>(bytes);
  if (threadIdx.x == 0) {
    constexpr uint32_t kConsumers = ptx::kWarpArrivals * kRowSumWarps;
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&shared.item_full[i], 1);
      ptx::mbarrier_init(&shared.item_empty[i], kConsumers + 2 * ptx::kWarpArrivals);
    }
    for (int stage = 0; stage < Config::kQueryStages; ++stage) {
      ptx::mbarrier_init(&shared.queries_full[stage], 1);
      ptx::mbarrier_init(&shared.queries_empty[stage], kConsumers);
    }
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1 + ptx::kWarpArrivals);
      ptx::mbarrier_init(&shared.empty[stage], kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  clear_queries<kRowSumThreads>(shared, params.tiles, kLookupRows);
  begin_dependent();
  __syncthreads();
  const int warpgroup = ptx::uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kRowSumProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      fetch_centroids(shared, params, maps);
    } else if (warp == 1) {
      fetch_sizes(shared, params, maps);
    } else if (threadIdx.x == 64) {
      take_lookup_items(shared, params, params.row_plan, params.taken);
    }
  } else {
    ptx::setmaxnreg_inc<kRowSumConsumerRegisters>();
    consume_rows<T, Config>(shared, params, warpgroup - 1);
  }
}

}  // namespace sqz::cuda::prefill
