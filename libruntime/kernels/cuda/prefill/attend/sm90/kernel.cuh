// Attention of tiles of query rows over lists of runs, for Hopper.
//
// A persistent block an SM: one warp takes items from the list of work and fetches queries, it and
// others fetch keys and values, a warp half a row; two consumer warpgroups hold 64 query rows each.
// While one of them computes its softmax the other multiplies (they take turns by named barriers),
// and within a warpgroup the product of a tile's queries and keys runs beside that of the weights
// and values before it.
//
// Where tiles have at most 64 query rows, there is one consumer warpgroup. Keys may have masks:
// which of the block's tokens attend to a key.
#pragma once

#include <cuda.h>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/prefill/attend/sm90/config.h"
#include "libruntime/kernels/cuda/prefill/attend/sm90/kernel.h"
#include "libruntime/kernels/cuda/prefill/attend/sm90/listed_rows.cuh"
#include "libruntime/kernels/cuda/prefill/attend/softmax.cuh"
#include "libruntime/kernels/cuda/prefill/common/items.cuh"
#include "libruntime/kernels/cuda/prefill/common/ring.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"
#include "libruntime/kernels/cuda/prefill/common/segments.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async_bulk.cuh"
#include "libruntime/kernels/cuda/ptx/fence_proxy_tensormap.cuh"
#include "libruntime/kernels/cuda/ptx/lane.cuh"
#include "libruntime/kernels/cuda/ptx/named_barrier.cuh"
#include "libruntime/kernels/cuda/ptx/setmaxnreg.cuh"
#include "libruntime/kernels/cuda/ptx/wgmma_product.cuh"

namespace sqz::cuda::prefill {

__device__ __forceinline__ KeyListView list_of(const PrefillAttendParams& params,
                                               const WorkItem& item) {
  const int32_t list = item.block * params.shape.kv_heads + item.kv_head;
  const ContextLayer* own = own_layer(params, item.block);
  return own == nullptr ? KeyListView::of(params.selected, list, params.exact,
                                          static_cast<int32_t>(params.keys.exact_skipped),
                                          static_cast<int32_t>(params.keys.slots))
                        : KeyListView::of(params.selected, list, params.selected.totals[list].exact,
                                          static_cast<int32_t>(own->keys.exact_skipped), 0);
}

// The tensor maps of an item's keys, seen by the copy engine. All lanes.
__device__ __forceinline__ const LayerMaps* maps_of(const PrefillAttendParams& params,
                                                    const AttendMaps& maps, const WorkItem& item) {
  const ContextLayer* own = own_layer(params, item.block);
  if (own == nullptr) return &maps;
  static_assert(sizeof(LayerMaps) == 32 * sizeof(CUtensorMap));
  if (own->maps != nullptr) {  // else the item has no keys
    ptx::fence_proxy_tensormap_acquire(reinterpret_cast<const CUtensorMap*>(own->maps) +
                                       (threadIdx.x & 31));
  }
  __syncwarp();
  return own->maps;
}

// Hands an item to all warps, at a position of the ring of items.
template <class Config>
__device__ __forceinline__ void publish_item(SharedStorage<Config>& shared, const WorkItem& item,
                                             const RingPosition<2>& ring) {
  ptx::mbarrier_wait_parity(&shared.item_empty[ring.stage], ring.parity ^ 1);
  if ((threadIdx.x & 31) == 0) {
    shared.items[ring.stage] = item;
    ptx::mbarrier_arrive(&shared.item_full[ring.stage]);
  }
  __syncwarp();
}

// Number of the next item that nobody has taken. All lanes.
__device__ __forceinline__ uint32_t take_number(const PrefillAttendParams& params) {
  uint32_t number = 0;
  if ((threadIdx.x & 31) == 0) number = atomicAdd(&params.counts->next, 1u);
  return __shfl_sync(kAllLanes, number, 0);
}

__device__ __forceinline__ WorkItem item_of(const PrefillAttendParams& params, uint32_t number) {
  WorkItem item;
  item.block = -1;
  if (number < params.counts->items) item = params.items[number];
  return item;
}

// Keys or values of one item, chunks [first, end); the leader of chunk 0 counts the tile's bytes.
// `masks`: of the item's list, for keys; or null.
template <class Config>
__device__ __forceinline__ void fetch_rows(const PrefillAttendParams& params, const WorkItem& item,
                                           const LayerMaps* maps, bool values, int first, int end,
                                           uint8_t (*tiles)[Config::kTileBytes], uint64_t* full,
                                           uint64_t* empty, RingPosition<Config::kStages>& ring,
                                           const uint32_t* masks = nullptr,
                                           uint32_t (*to_masks)[Config::kKeys] = nullptr) {
  const bool counts = (threadIdx.x & 31) == 0 && first == 0;
  const uint64_t policy = ptx::createpolicy_evict_last();
  const RowMaps& slots = values ? maps->values : maps->keys;
  const RowMaps& exact = values ? maps->exact_values : maps->exact_keys;
  SegmentWindow window(list_of(params, item), item.begin);
  const int32_t step = Config::kSkips ? item.step : Config::kKeys;
  for (int32_t key = item.begin; key < item.end; key += step, ring.advance()) {
    if (Config::kSkips) window.skip_to(key);
    ptx::mbarrier_wait_parity(&empty[ring.stage], ring.parity ^ 1);
    if (counts && masks != nullptr) {
      constexpr uint32_t kBytes = Config::kKeys * sizeof(uint32_t);
      ptx::mbarrier_arrive_expect_tx(&full[ring.stage], Config::kTileBytes + kBytes);
      ptx::cp_async_bulk(to_masks[ring.stage], masks + key, kBytes, &full[ring.stage]);
    } else if (counts) {
      ptx::mbarrier_arrive_expect_tx(&full[ring.stage], Config::kTileBytes);
    }
    __syncwarp();
    fetch_tile<Config::kKeys>(first, end, window, key, item.kv_head, slots, exact,
                              tiles[ring.stage], &full[ring.stage], policy);
  }
}

// Starts to fetch an item's queries. `parity`: of the number of items before it.
template <class Config>
__device__ __forceinline__ void fetch_queries(SharedStorage<Config>& shared,
                                              const PrefillAttendParams& params,
                                              const AttendMaps& maps, const WorkItem& item,
                                              uint32_t parity) {
  const uint32_t bytes = params.tiles.heads * params.tiles.tokens * Config::kChunks * kRowBytes;
  ptx::mbarrier_wait_parity(&shared.queries_empty, parity ^ 1);
  if ((threadIdx.x & 31) == 0) {
    const int2 block = block_of(params.blocks, item.block);
    const uint64_t once = ptx::createpolicy_evict_first();
    ptx::mbarrier_arrive_expect_tx(&shared.queries_full, bytes);
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      ptx::cp_async_bulk_tensor_4d(shared.queries + chunk * Config::kQueryRows * kRowBytes,
                                   &maps.queries, chunk * (kRowBytes / 2), 0, item.kv_head,
                                   block.x + item.tile * params.tiles.tokens, &shared.queries_full,
                                   once);
    }
  }
  __syncwarp();
}

// A producer warp's part of keys or values. The first warp also takes the items, and fetches
// queries.
template <class T, class Config, bool kMasked>
__device__ void produce(SharedStorage<Config>& shared, const PrefillAttendParams& params,
                        const AttendMaps& maps, int warp) {
  ItemReader<SharedStorage<Config>> items(shared);
  RingPosition<Config::kStages> ring;
  WorkItem item;
  if (warp == 0) publish_item(shared, item_of(params, take_number(params)), items.position());
  while (items.next(item)) {
    if (warp == 0) {
      shared.next_item = take_number(params);
      fetch_queries(shared, params, maps, item, items.position().stage ^ 1);
    }
    if constexpr (Config::kCoded) {
      RowFetcher<T, Config>(shared, params, item, warp).run(ring);
    } else {
      const bool values = takes_values(warp);
      const int first = warp < 2 ? 0 : Config::kFirstChunks;
      const int end = warp < 2 ? Config::kFirstChunks : Config::kChunks;
      const uint32_t* masks = nullptr;
      if (kMasked && params.masks != nullptr && !values) {
        masks =
            params.masks + (item.block * params.shape.kv_heads + item.kv_head) * params.mask_stride;
      }
      // Nobody waits for a warp that fetches nothing: it would fall behind by a round of the ring,
      // and then wait for a parity that never comes.
      if (first < end) {
        fetch_rows<Config>(
            params, item, maps_of(params, maps, item), values, first, end,
            values ? shared.values : shared.keys, values ? shared.values_full : shared.keys_full,
            values ? shared.values_empty : shared.keys_empty, ring, masks, shared.masks);
      }
    }
    if (warp == 0) publish_item(shared, item_of(params, shared.next_item), items.position());
  }
}

// Starts logits = queries of a warpgroup times a tile of keys.
template <class T, class Config>
__device__ __forceinline__ void start_logits(float (&logits)[Config::kKeys / 2], uint64_t queries,
                                             uint64_t keys) {
  ptx::fence_registers(logits);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Config::kDim / 16; ++k) {
    const int chunk = k / 4, within = k % 4 * 32;
    ptx::WgmmaProduct<T, Config::kKeys>::template multiply<0>(
        logits, ptx::advanced(queries, chunk * Config::kQueryRows * kRowBytes + within),
        ptx::advanced(keys, chunk * Config::kKeys * kRowBytes + within), k > 0);
  }
  ptx::wgmma_commit_group();
}

// Starts out += weights times a tile of values.
template <class T, class Config>
__device__ __forceinline__ void start_values(float (&out)[Config::kDim / 2],
                                             const uint32_t (&weights)[Config::kKeys / 16][4],
                                             uint64_t values) {
  ptx::fence_registers(out);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Config::kKeys / 16; ++k) {
    ptx::WgmmaProduct<T, Config::kDim>::template multiply<1>(
        out, weights[k], ptx::advanced(values, 16 * k * kRowBytes), 1);
  }
  ptx::wgmma_commit_group();
}

// The turns of two warpgroups in issuing products.
template <class Config>
struct Turns {
  static constexpr bool kTaken = Config::kGroups == 2;
  static constexpr int kThreads = 32 * Config::kConsumerWarps;
  int mine, others;

  explicit __device__ __forceinline__ Turns(int warpgroup)
      : mine(1 + warpgroup), others(2 - warpgroup) {
    if (warpgroup == 1) pass();  // the first one begins
  }
  __device__ __forceinline__ void wait() const {
    if (kTaken) ptx::bar_sync(mine, kThreads);
  }
  __device__ __forceinline__ void pass() const {
    if (kTaken) ptx::bar_arrive(others, kThreads);
  }
};

// A lane's masks of a tile of keys. Where there are registers for them they are loaded while the
// tensor cores work.
template <int kKeys>
class KeyMasks {
 public:
  // From the lane's first key on.
  __device__ __forceinline__ void load(const uint32_t* masks) {
    const auto* pairs = reinterpret_cast<const uint2*>(masks);
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) pairs_[j] = pairs[4 * j];
  }
  // Logits of keys that a row's token does not attend to become -infinity. `bits`: of the tokens of
  // rows r and r + 8.
  __device__ __forceinline__ void apply(float (&logits)[kKeys / 2],
                                        const uint32_t (&bits)[2]) const {
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if ((pairs_[j].x & bits[half]) == 0) logits[4 * j + 2 * half] = -INFINITY;
        if ((pairs_[j].y & bits[half]) == 0) logits[4 * j + 2 * half + 1] = -INFINITY;
      }
    }
  }

 private:
  uint2 pairs_[kKeys / 8];
};

// Writes row r + 8 half of a thread's `out` to partial state `state`, or, where that is -1, to the
// output of a query.
template <class T, class Config>
__device__ __forceinline__ void store_row(const PrefillAttendParams& params, int64_t state,
                                          int64_t query, int half,
                                          const float (&out)[Config::kDim / 2]) {
  const int lane = threadIdx.x & 3;
  float* partial = params.partial_out + state * Config::kDim + 2 * lane;
  auto* final = reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + query * Config::kDim);
#pragma unroll
  for (int j = 0; j < Config::kDim / 8; ++j) {
    const float2 pair = make_float2(out[4 * j + 2 * half], out[4 * j + 2 * half + 1]);
    if (state >= 0) {
      *reinterpret_cast<float2*>(partial + 8 * j) = pair;
    } else {
      final[4 * j + lane] = pack_result<T>(pair.x, pair.y);
    }
  }
}

template <class T, class Config, bool kMasked>
__device__ void consume(SharedStorage<Config>& shared, const PrefillAttendParams& params,
                        int warpgroup) {
  constexpr int kKeys = Config::kKeys;
  const int lane = ptx::lane(), warp = (threadIdx.x >> 5) & 3;
  const uint64_t queries =
      ptx::matrix_descriptor<kRowBytes>(shared.queries + 64 * warpgroup * kRowBytes);
  const auto keys_of = [&](int stage) {
    return ptx::matrix_descriptor<kRowBytes>(shared.keys[stage]);
  };
  const auto values_of = [&](int stage) {
    return ptx::matrix_descriptor<kRowBytes>(shared.values[stage], kKeys * kRowBytes);
  };
  auto release = [&](uint64_t* barrier) { ptx::mbarrier_arrive_warp(barrier); };

  const int first_row = 64 * warpgroup + 16 * warp + (lane >> 2);
  // The bits of the tokens of this lane's rows.
  uint32_t bits[2] = {0, 0};
  if (kMasked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows past the last token have a result that nobody reads.
      bits[half] = 1u << min((first_row + 8 * half) / params.tiles.heads, 31);
    }
  }
  const Turns<Config> turns(warpgroup);
  ItemReader<SharedStorage<Config>> items(shared);
  RingPosition<Config::kStages> keys, values;
  RingPosition<1> query_ring;
  WorkItem item;
  while (items.next(item)) {
    const int step = Config::kSkips ? item.step : kKeys;
    const int tiles = (item.end - item.begin + step - 1) / step;
    float out[Config::kDim / 2] = {};  // unset, its registers would be taken from item to item
    Softmax<kKeys> softmax;
    const bool masked = kMasked && params.masks != nullptr;
    KeyMasks<kKeys> masks;
    const auto load_masks = [&](bool now) {
      if (masked && now) masks.load(shared.masks[keys.stage] + 2 * (lane % 4));
    };
    const auto finish_logits = [&](float(&logits)[kKeys / 2], int i) {
      load_masks(!Config::kEarlyMasks);
      if (masked) masks.apply(logits, bits);
      release(&shared.keys_empty[keys.stage]);
      keys.advance();
      if (i + 1 == tiles) {
        release(&shared.queries_empty);
        softmax.mask(logits, item.end - item.begin - i * step);
      }
    };
    ptx::mbarrier_wait_parity(&shared.queries_full, query_ring.parity);
    query_ring.advance();
    if (tiles == 0) {
      release(&shared.queries_empty);
    } else {
      float logits[kKeys / 2];
      uint32_t weights[kKeys / 16][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (is_row_beyond<T, Config::kChunks, Config::kQueryRows>(
                shared.queries, first_row + 8 * half, params.scale)) {
          softmax.spoil(half);
        }
      }
      ptx::mbarrier_wait_parity(&shared.keys_full[keys.stage], keys.parity);
      turns.wait();
      start_logits<T, Config>(logits, queries, keys_of(keys.stage));
      turns.pass();
      load_masks(Config::kEarlyMasks);
      ptx::wgmma_wait_group<0>();
      ptx::fence_registers(logits);
      finish_logits(logits, 0);
      softmax.weigh(logits, params.scale);
      softmax.template pack<T>(logits, weights);
      for (int i = 1; i < tiles; ++i) {
        ptx::mbarrier_wait_parity(&shared.keys_full[keys.stage], keys.parity);
        turns.wait();
        start_logits<T, Config>(logits, queries, keys_of(keys.stage));
        ptx::mbarrier_wait_parity(&shared.values_full[values.stage], values.parity);
        start_values<T, Config>(out, weights, values_of(values.stage));
        turns.pass();
        load_masks(Config::kEarlyMasks);
        ptx::wgmma_wait_group<1>();
        ptx::fence_registers(logits);
        finish_logits(logits, i);
        const bool moved = softmax.weigh(logits, params.scale);
        ptx::wgmma_wait_group<0>();
        ptx::fence_registers(out);
        release(&shared.values_empty[values.stage]);
        values.advance();
        softmax.template pack<T>(logits, weights);
        if (moved) softmax.rescale(out);
      }
      ptx::mbarrier_wait_parity(&shared.values_full[values.stage], values.parity);
      start_values<T, Config>(out, weights, values_of(values.stage));
      ptx::wgmma_wait_group<0>();
      ptx::fence_registers(out);
      release(&shared.values_empty[values.stage]);
      values.advance();
    }

    const uint32_t faults =
        params.selected.totals == nullptr
            ? 0
            : params.selected.totals[item.block * params.shape.kv_heads + item.kv_head].fault;
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool fault = (kMasked ? faults & bits[half] : faults) != 0;
      RowEnd end = softmax.finish(half, out, kMostLogit);  // by all lanes
      if (fault) end = {NAN, NAN};
      lse[half] = end.lse;
#pragma unroll
      for (int i = 0; i < Config::kDim / 2; ++i) {
        if (i / 2 % 2 == half) out[i] *= end.inverse;
      }
    }
    const int2 block = block_of(params.blocks, item.block);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half;
      int64_t state = -1, query = 0;
      if (item.slot >= 0) {
        state = static_cast<int64_t>(item.slot) * params.tile_rows + row;
      } else {
        query = query_index(params.tiles, block, item.kv_head, params.shape.kv_heads,
                            params.shape.group, item.tile, row);
        if (query < 0) continue;
      }
      if ((lane & 3) == 0) {
        (state >= 0 ? params.partial_lse[state] : params.lse[query]) = lse[half];
      }
      store_row<T, Config>(params, state, query, half, out);
    }
  }
}

template <class T, class Config, bool kMasked>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attend_kernel(const __grid_constant__ PrefillAttendParams params,
                  const __grid_constant__ AttendMaps maps) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&shared.item_full[i], 1);
      ptx::mbarrier_init(&shared.item_empty[i],
                         ptx::kWarpArrivals * (Config::kProducerWarps + Config::kConsumerWarps));
    }
    ptx::mbarrier_init(&shared.queries_full, 1);
    constexpr uint32_t kConsumers = ptx::kWarpArrivals * Config::kConsumerWarps;
    constexpr uint32_t producers = Config::kCoded ? copy_arrivals<Config>() : 1;
    ptx::mbarrier_init(&shared.queries_empty, kConsumers);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.keys_full[stage], producers);
      ptx::mbarrier_init(&shared.keys_empty[stage], kConsumers);
      ptx::mbarrier_init(&shared.values_full[stage], producers);
      ptx::mbarrier_init(&shared.values_empty[stage], kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  begin_dependent();
  __syncthreads();
  constexpr int kProducers = 32 * Config::kProducerWarps;
  if (threadIdx.x < kProducers) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    produce<T, Config, kMasked>(shared, params, maps, threadIdx.x / 32);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    const int warpgroup = ptx::uniform(static_cast<int>(threadIdx.x - kProducers) / 128);
    consume<T, Config, kMasked>(shared, params, warpgroup);
  }
}

template <class T, int kDim, int kGroups, bool kMasked, bool kCoded = false>
Status launch_kernel(const PrefillAttendParams& params, const AttendMaps& maps, int multiprocessors,
                     cudaStream_t stream) {
  using Layout = Config<kDim, tile_keys(kDim, kGroups == 1, kMasked, kCoded), kCoded, kGroups>;
  constexpr size_t kBytes = sizeof(SharedStorage<Layout>);
  static_assert(kBytes <= kSharedLimit);
  auto* kernel = attend_kernel<T, Layout, kMasked>;
  const int grid = params.item_capacity < multiprocessors ? params.item_capacity : multiprocessors;
  return launch_blocks(kernel, grid, Layout::kThreads, kBytes, kHopper, stream, params, maps);
}

template <class T, int kDim>
Status launch_attend(const PrefillAttendParams& params, int multiprocessors, cudaStream_t stream) {
  AttendMaps maps;
  SQZ_RETURN_IF_ERROR(encode_query_map(maps.queries, params.shape, params.queries,
                                       params.blocks.tokens, params.tiles.heads,
                                       params.tiles.tokens));
  const bool coded = params.keys.coded.present();
  if (!coded && params.own == nullptr) {
    KeyMaps own;
    KeyMaps& keys = params.maps != nullptr ? *params.maps : own;
    SQZ_RETURN_IF_ERROR(encode_key_maps(keys, params.shape, params.keys));
    static_cast<LayerMaps&>(maps) = keys;
  }
  const bool one = params.tile_rows < kRows;  // consumer warpgroup
  auto* launch = params.masks == nullptr
                     ? (one ? launch_kernel<T, kDim, 1, false> : launch_kernel<T, kDim, 2, false>)
                     : (one ? launch_kernel<T, kDim, 1, true> : launch_kernel<T, kDim, 2, true>);
  if constexpr (kDim <= kMostCodedDim) {
    if (coded) {
      launch = one ? launch_kernel<T, kDim, 1, true, true> : launch_kernel<T, kDim, 2, true, true>;
    }
  }
  return launch(params, maps, multiprocessors, stream);
}

}  // namespace sqz::cuda::prefill
