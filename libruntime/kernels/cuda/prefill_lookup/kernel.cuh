// The passes of the prefill lookup, for Hopper.
//
// A persistent block an SM takes items of 256 query rows and up to kPieceTiles tiles of centroids.
// One warp takes items, one fetches queries and centroids, one brings what a tile or its rows need
// besides, one adds up columns; four consumer warpgroups hold 64 query rows each in registers.
// While one of them works on its products the others' run.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/prefill_common/ring.cuh"
#include "libruntime/kernels/cuda/prefill_common/rows.cuh"
#include "libruntime/kernels/cuda/prefill_common/segments.cuh"
#include "libruntime/kernels/cuda/prefill_lookup/epilogue.cuh"
#include "libruntime/kernels/cuda/prefill_lookup/kernel.h"
#include "libruntime/kernels/cuda/ptx/cp_async_bulk_tensor_4d.cuh"
#include "libruntime/kernels/cuda/ptx/fence_proxy_async.cuh"
#include "libruntime/kernels/cuda/ptx/ldmatrix.cuh"
#include "libruntime/kernels/cuda/ptx/named_barrier.cuh"
#include "libruntime/kernels/cuda/ptx/setmaxnreg.cuh"
#include "libruntime/kernels/cuda/ptx/wgmma_product.cuh"

namespace sqz::cuda::prefill {

struct LookupMaps {
  CUtensorMap queries;
  RowMaps centroids;
};

template <class Config>
class LookupItems {
 public:
  __device__ __forceinline__ explicit LookupItems(LookupStorage<Config>& shared)
      : shared_(shared) {}

  // False at the end. All lanes of a warp.
  __device__ __forceinline__ bool next(LookupItem& item) {
    ptx::mbarrier_wait_parity(&shared_.item_full[ring_.stage], ring_.parity);
    item = shared_.items[ring_.stage];
    ptx::mbarrier_arrive_warp(&shared_.item_empty[ring_.stage]);
    ring_.advance();
    return item.block >= 0;
  }

 private:
  LookupStorage<Config>& shared_;
  RingPosition<2> ring_;
};

__device__ __forceinline__ KeyListView clusters_of(const LookupParams& params, int32_t list) {
  return KeyListView::of(params.alive, list, 0, 0, params.clusters);
}

// Item `index` of all; false if there is nothing to do in it.
template <int kTile>
__device__ __forceinline__ bool lookup_item(const LookupParams& params, int32_t index,
                                            LookupItem& item) {
  item.row_tile = index % params.row_tiles;
  index /= params.row_tiles;
  item.piece = index % params.pieces;
  index /= params.pieces;
  item.block = index % params.blocks.count;
  item.kv_head = index / params.blocks.count;
  item.list = item.block * params.kv_heads + item.kv_head;
  item.tile = item.row_tile / params.heads_apart;
  item.head = item.row_tile % params.heads_apart;
  const int32_t total = params.alive.runs == nullptr
                            ? params.clusters
                            : static_cast<int32_t>(params.alive.totals[item.list]);
  const int32_t tiles = (total + kTile - 1) / kTile;
  const int32_t pieces = (tiles + kPieceTiles - 1) / kPieceTiles;
  if (item.piece >= pieces) return false;
  if (item.tile * params.tiles.tokens >= block_of(params.blocks, item.block).y) return false;
  const int32_t length = (tiles + pieces - 1) / pieces * kTile;
  item.begin = item.piece * length;
  item.end = min(item.begin + length, total);
  return item.begin < item.end || item.piece == 0;
}

template <class Config>
__device__ void take_lookup_items(LookupStorage<Config>& shared, const LookupParams& params,
                                  uint32_t* taken) {
  const int32_t count = params.row_tiles * params.pieces * params.blocks.count * params.kv_heads;
  RingPosition<2> ring;
  LookupItem item;
  do {
    int32_t index;
    do {
      index = static_cast<int32_t>(atomicAdd(taken, 1u));
    } while (index < count && !lookup_item<Config::kTile>(params, index, item));
    if (index >= count) item.block = -1;
    ptx::mbarrier_wait_parity(&shared.item_empty[ring.stage], ring.parity ^ 1);
    shared.items[ring.stage] = item;
    ptx::mbarrier_arrive(&shared.item_full[ring.stage]);
    ring.advance();
  } while (item.block >= 0);
}

template <class Config>
__device__ void fetch_centroids(LookupStorage<Config>& shared, const LookupParams& params,
                                const LookupMaps& maps) {
  const bool leader = (threadIdx.x & 31) == 0;
  const uint64_t often = ptx::createpolicy_evict_last();
  const uint32_t query_bytes =
      params.tiles.heads * params.tiles.tokens * Config::kChunks * kRowBytes;
  LookupItems<Config> items(shared);
  RingPosition<Config::kStages> ring;
  RingPosition<1> queries;
  LookupItem item;
  while (items.next(item)) {
    ptx::mbarrier_wait_parity(&shared.queries_empty, queries.parity ^ 1);
    queries.advance();
    if (leader) {
      const int2 block = block_of(params.blocks, item.block);
      ptx::mbarrier_arrive_expect_tx(&shared.queries_full, query_bytes);
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        ptx::cp_async_bulk_tensor_4d(shared.queries + chunk * kLookupRows * kRowBytes,
                                     &maps.queries, chunk * (kRowBytes / 2), item.head,
                                     item.kv_head, block.x + item.tile * params.tiles.tokens,
                                     &shared.queries_full, often);
      }
    }
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
__device__ __forceinline__ void fetch_rest(LookupStorage<Config>& shared, const LookupMaps& maps,
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
__device__ void fetch_sizes(LookupStorage<Config>& shared, const LookupParams& params,
                            const LookupMaps& maps) {
  constexpr int kTile = Config::kTile;
  const int lane = threadIdx.x & 31;
  LookupItems<Config> items(shared);
  RingPosition<Config::kStages> ring;
  LookupItem item;
  while (items.next(item)) {
    const bool all = params.alive.runs == nullptr;
    const uint32_t* sizes =
        all ? params.sizes + static_cast<int64_t>(item.kv_head) * params.clusters
            : params.alive_sizes + static_cast<int64_t>(item.list) * params.clusters;
    SegmentWindow window(clusters_of(params, item.list), item.begin);
    for (int32_t at = item.begin; at < item.end; at += kTile, ring.advance()) {
      float mine[kTile / 32];
      bool zero = false;
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
        zero |= mine[i] == 0;
      }
      zero = __any_sync(kAllLanes, zero);
      if (lane == 0) shared.empty_clusters[ring.stage] = zero;
      ptx::mbarrier_arrive_warp(&shared.full[ring.stage]);
    }
  }
}

// The other chunks, and the denominators of each item's rows; +infinity, so that its S are 0, for a
// row that is no query.
template <class Config>
__device__ void fetch_denominators(LookupStorage<Config>& shared, const LookupParams& params,
                                   const LookupMaps& maps) {
  const int lane = threadIdx.x & 31;
  LookupItems<Config> items(shared);
  RingPosition<Config::kStages> ring;
  RingPosition<1> rows;
  LookupItem item;
  while (items.next(item)) {
    const int2 block = block_of(params.blocks, item.block);
    ptx::mbarrier_wait_parity(&shared.queries_empty, rows.parity ^ 1);
    rows.advance();
    float lse[kLookupRows / 32];
#pragma unroll
    for (int i = 0; i < kLookupRows / 32; ++i) {
      const int64_t query = query_index(params.tiles, block, item.kv_head, params.kv_heads,
                                        params.group, item.tile, lane + 32 * i);
      lse[i] = query < 0 ? INFINITY : params.lse[query + item.head];
    }
#pragma unroll
    for (int i = 0; i < kLookupRows / 32; ++i) shared.lse[lane + 32 * i] = lse[i];
    ptx::mbarrier_arrive_warp(&shared.queries_full);
    // Nobody waits for a warp that fetches nothing: it would fall behind by a round of the ring,
    // and then wait for a parity that never comes.
    if constexpr (Config::kFirstChunks < Config::kChunks) {
      SegmentWindow window(clusters_of(params, item.list), item.begin);
      for (int32_t at = item.begin; at < item.end; at += Config::kTile, ring.advance()) {
        ptx::mbarrier_wait_parity(&shared.empty[ring.stage], ring.parity ^ 1);
        fetch_rest(shared, maps, window, item, at, ring.stage);
      }
    }
  }
}

// Adds the warps' columns up, in their order.
template <class Config, bool kMaxima>
__device__ void add_columns(LookupStorage<Config>& shared, const LookupParams& params) {
  constexpr int kTile = Config::kTile;
  const int lane = threadIdx.x & 31;
  const int64_t lists = static_cast<int64_t>(params.blocks.count) * params.kv_heads;
  LookupItems<Config> items(shared);
  RingPosition<kColumnStages> ring;
  LookupItem item;
  while (items.next(item)) {
    float* to = params.columns + (item.row_tile * lists + item.list) * params.clusters;
    for (int32_t at = item.begin; at < item.end; at += kTile, ring.advance()) {
      ptx::mbarrier_wait_parity(&shared.columns_full[ring.stage], ring.parity);
      for (int i = lane; i < kTile; i += 32) {
        float sum = shared.columns[ring.stage][0][i];
#pragma unroll
        for (int warp = 1; warp < kLookupConsumerWarps; ++warp) {
          const float value = shared.columns[ring.stage][warp][i];
          sum = kMaxima ? fmaxf(sum, value) : sum + value;
        }
        if (at + i < item.end) to[at + i] = sum;
      }
      ptx::mbarrier_arrive_warp(&shared.columns_empty[ring.stage]);
    }
  }
}

// The A operand of one consumer warpgroup: 64 query rows.
template <class T, class Config, bool kInRegisters = Config::kQueriesInRegisters>
class Queries {
 public:
  __device__ __forceinline__ void load(const LookupStorage<Config>& shared, int warpgroup) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int row = 64 * warpgroup + 16 * warp + (lane & 15);
    const uint32_t base = ptx::shared_address(shared.queries) + row * kRowBytes;
#pragma unroll
    for (int k = 0; k < Config::kSteps; ++k) {
      const int chunk = k / 4, piece = k % 4 * 2 + (lane >> 4);
      ptx::ldmatrix_x4(fragments_[k],
                       base + chunk * kLookupRows * kRowBytes + ((piece ^ (row & 7)) << 4));
    }
  }

  __device__ __forceinline__ void multiply(float (&tile)[Config::kTile / 2], int k,
                                           uint64_t centroids) const {
    ptx::WgmmaProduct<T, Config::kTile>::template multiply<0>(tile, fragments_[k], centroids,
                                                              k > 0);
  }

 private:
  uint32_t fragments_[Config::kSteps][4];
};

template <class T, class Config>
class Queries<T, Config, false> {
 public:
  __device__ __forceinline__ void load(const LookupStorage<Config>& shared, int warpgroup) {
    descriptor_ = ptx::matrix_descriptor<kRowBytes>(ptx::shared_address(shared.queries) +
                                                    64 * warpgroup * kRowBytes);
  }

  __device__ __forceinline__ void multiply(float (&tile)[Config::kTile / 2], int k,
                                           uint64_t centroids) const {
    const uint64_t offset = (k / 4 * kLookupRows * kRowBytes + k % 4 * 32) >> 4;
    ptx::WgmmaProduct<T, Config::kTile>::template multiply<0>(tile, descriptor_ + offset, centroids,
                                                              k > 0);
  }

 private:
  uint64_t descriptor_;
};

// The turns of the warpgroups in issuing products. Without them all multiply at the same time, each
// at a fraction of the speed, and then all compute exponentials while the tensor cores wait.
class Turns {
 public:
  explicit __device__ __forceinline__ Turns(int warpgroup)
      : mine_(1 + warpgroup), next_(1 + (warpgroup + 1) % kWarpgroups) {
    if (warpgroup == kWarpgroups - 1) pass();  // the first one begins
  }
  __device__ __forceinline__ void wait() const { ptx::bar_sync(mine_, 256); }
  __device__ __forceinline__ void pass() const { ptx::bar_arrive(next_, 256); }

 private:
  static constexpr int kWarpgroups = kLookupConsumerWarps / 4;
  int mine_, next_;
};

// tile = queries times the centroids of a stage.
template <class T, class Config>
__device__ __forceinline__ void multiply_tile(float (&tile)[Config::kTile / 2],
                                              const Queries<T, Config>& queries, uint64_t centroids,
                                              const Turns& turns) {
  turns.wait();
  ptx::fence_registers(tile);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Config::kSteps; ++k) {
    queries.multiply(tile, k, centroids + ((k / 4 * Config::kTile * kRowBytes + k % 4 * 32) >> 4));
    if (k + 1 == Config::kSteps / 2) ptx::wgmma_commit_group();
  }
  ptx::wgmma_commit_group();
  // Products are issued long before they run: the turn is over when half of them are done, so that
  // the next ones are there when the others end.
  ptx::wgmma_wait_group<1>();
  turns.pass();
  ptx::wgmma_wait_group<0>();
  ptx::fence_registers(tile);
}

template <class T, class Config, Pass kPass>
__device__ void consume_products(LookupStorage<Config>& shared, const LookupParams& params,
                                 int warpgroup) {
  constexpr int kTile = Config::kTile;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const uint64_t first_stage =
      ptx::matrix_descriptor<kRowBytes>(ptx::shared_address(shared.centroids[0]));
  auto release = [&](uint64_t* barrier) { ptx::mbarrier_arrive_warp(barrier); };
  const int first_row = 64 * warpgroup + 16 * warp + (lane >> 2);  // of this lane; and + 8
  const float scale = params.scale;

  const Turns turns(warpgroup);
  LookupItems<Config> items(shared);
  RingPosition<Config::kStages> ring;
  RingPosition<1> query_ring;
  RingPosition<kColumnStages> column_ring;
  LookupItem item;
  float tile[kTile / 2];
  while (items.next(item)) {
    Queries<T, Config> queries;
    ptx::mbarrier_wait_parity(&shared.queries_full, query_ring.parity);
    query_ring.advance();
    queries.load(shared, warpgroup);
    float lse[2];
    if constexpr (kPass != Pass::kRowSums) {
      lse[0] = shared.lse[first_row];
      lse[1] = shared.lse[first_row + 8];
    }
    if constexpr (Config::kQueriesInRegisters) release(&shared.queries_empty);
    RowSums sums;
    for (int32_t at = item.begin; at < item.end; at += kTile, ring.advance()) {
      ptx::mbarrier_wait_parity(&shared.full[ring.stage], ring.parity);
      multiply_tile<T, Config>(
          tile, queries,
          first_stage + static_cast<uint64_t>(ring.stage * (Config::kTileBytes >> 4)), turns);
      if constexpr (kPass == Pass::kRowSums) {
        sums.add<kTile>(tile, shared.sizes[ring.stage], shared.empty_clusters[ring.stage] != 0,
                        scale);
        release(&shared.empty[ring.stage]);
      } else {
        release(&shared.empty[ring.stage]);
        Columns<kTile, kPass == Pass::kColumnMaxima> columns;
        columns.add(tile, lse, scale);
        ptx::mbarrier_wait_parity(&shared.columns_empty[column_ring.stage], column_ring.parity ^ 1);
        columns.store(shared.columns[column_ring.stage][4 * warpgroup + warp]);
        release(&shared.columns_full[column_ring.stage]);
        column_ring.advance();
      }
    }
    if constexpr (!Config::kQueriesInRegisters) release(&shared.queries_empty);
    if constexpr (kPass == Pass::kRowSums) {
      const int2 block = block_of(params.blocks, item.block);
      const int64_t queries_of_call =
          static_cast<int64_t>(params.blocks.tokens) * params.kv_heads * params.group;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 state = sums.finish(half);
        const int64_t query = query_index(params.tiles, block, item.kv_head, params.kv_heads,
                                          params.group, item.tile, first_row + 8 * half);
        if ((lane & 3) == 0 && query >= 0) {
          params.row_states[item.piece * queries_of_call + query + item.head] = state;
        }
      }
    }
  }
}

template <class T, class Config, Pass kPass>
__global__ void __launch_bounds__(kLookupThreads, 1)
    lookup_kernel(const __grid_constant__ LookupParams params,
                  const __grid_constant__ LookupMaps maps) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<LookupStorage<Config>*>(bytes);
  constexpr bool kRowSums = kPass == Pass::kRowSums;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&shared.item_full[i], 1);
      ptx::mbarrier_init(&shared.item_empty[i],
                         ptx::kWarpArrivals * (kLookupConsumerWarps + (kRowSums ? 2 : 3)));
    }
    constexpr uint32_t kConsumers = ptx::kWarpArrivals * kLookupConsumerWarps;
    ptx::mbarrier_init(&shared.queries_full, kRowSums ? 1 : 1 + ptx::kWarpArrivals);
    ptx::mbarrier_init(&shared.queries_empty, kConsumers);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], kRowSums ? 1 + ptx::kWarpArrivals : 1);
      ptx::mbarrier_init(&shared.empty[stage], kConsumers);
    }
    for (int stage = 0; stage < kColumnStages; ++stage) {
      ptx::mbarrier_init(&shared.columns_full[stage], kConsumers);
      ptx::mbarrier_init(&shared.columns_empty[stage], ptx::kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  // Rows that no box fills are read by products all the same.
  for (int i = threadIdx.x; i < Config::kQueryBytes / 16; i += kLookupThreads) {
    reinterpret_cast<uint4*>(shared.queries)[i] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kLookupProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      fetch_centroids(shared, params, maps);
    } else if (warp == 1) {
      if constexpr (kRowSums) {
        fetch_sizes(shared, params, maps);
      } else {
        fetch_denominators(shared, params, maps);
      }
    } else if (warp == 2) {
      if (threadIdx.x == 64) take_lookup_items(shared, params, params.taken + (kRowSums ? 0 : 1));
    } else if constexpr (!kRowSums) {
      add_columns<Config, kPass == Pass::kColumnMaxima>(shared, params);
    }
  } else {
    ptx::setmaxnreg_inc<kLookupConsumerRegisters>();
    consume_products<T, Config, kPass>(shared, params, warpgroup - 1);
  }
}

template <class T, class Config, Pass kPass>
Status launch_lookup(const LookupParams& params, const LookupMaps& maps, int multiprocessors,
                     cudaStream_t stream) {
  constexpr size_t kShared = sizeof(LookupStorage<Config>);
  static_assert(kShared <= kLookupSharedLimit);
  auto* kernel = lookup_kernel<T, Config, kPass>;
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  const int64_t items =
      int64_t{params.row_tiles} * params.pieces * params.blocks.count * params.kv_heads;
  const int grid = static_cast<int>(items < multiprocessors ? items : multiprocessors);
  kernel<<<grid, kLookupThreads, kShared, stream>>>(params, maps);
  return cuda_status(cudaGetLastError(), "prefill lookup kernel, compute capability 9.0");
}

template <class T, int kDim>
Status launch_lookup_passes(const LookupParams& params, const PrefillLookup& call,
                            int multiprocessors, cudaStream_t stream) {
  using Layout = LookupConfig<kDim, kLookupTile<kDim>>;
  LookupMaps maps;
  SQZ_RETURN_IF_ERROR(encode_query_map(maps.queries, call.shape, call.queries, call.blocks.tokens,
                                       params.tiles.heads, params.tiles.tokens));
  SQZ_RETURN_IF_ERROR(encode_row_maps(maps.centroids, call.level.centroids, call.shape.kv_heads,
                                      call.level.clusters, kDim));
  SQZ_RETURN_IF_ERROR(
      (launch_lookup<T, Layout, Pass::kRowSums>(params, maps, multiprocessors, stream)));
  SQZ_RETURN_IF_ERROR(launch_denominators(params, stream));
  if (call.policy == PrefillGroup::kAny) {
    return launch_lookup<T, Layout, Pass::kColumnMaxima>(params, maps, multiprocessors, stream);
  }
  return launch_lookup<T, Layout, Pass::kColumnSums>(params, maps, multiprocessors, stream);
}

}  // namespace sqz::cuda::prefill
