// Both passes of the prefill lookup take items of queries and centroids, for Hopper.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/prefill/common/items.cuh"
#include "libruntime/kernels/cuda/prefill/common/ring.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"
#include "libruntime/kernels/cuda/prefill/common/segments.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/kernel.h"
#include "libruntime/kernels/cuda/ptx/cp_async_bulk.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"
#include "libruntime/kernels/cuda/ptx/fence_proxy_async.cuh"
#include "libruntime/kernels/cuda/ptx/setmaxnreg.cuh"
#include "libruntime/kernels/cuda/ptx/wgmma_product.cuh"

namespace sqz::cuda::prefill {

struct LookupMaps {
  CUtensorMap queries;
  RowMaps centroids;
};

__device__ __forceinline__ KeyListView clusters_of(const PrefillLookupParams& params,
                                                   int32_t list) {
  return KeyListView::of(params.alive, list, 0, 0, params.level.clusters);
}

// Item `index` of a pass; false if there is nothing to do in it.
__device__ __forceinline__ bool lookup_item(const PrefillLookupParams& params, const ItemPlan& plan,
                                            int32_t index, LookupItem& item) {
  item.tile = index % plan.row_tiles;
  index /= plan.row_tiles;
  item.piece = index % plan.pieces;
  index /= plan.pieces;
  item.block = index % params.blocks.count;
  item.kv_head = index / params.blocks.count;
  item.list = item.block * params.shape.kv_heads + item.kv_head;
  const int32_t total = alive_clusters(params, item.list);
  const int32_t tiles = (total + plan.clusters - 1) / plan.clusters;
  const int32_t pieces = (tiles + kPieceTiles - 1) / kPieceTiles;
  if (item.piece >= pieces) return false;
  if (item.tile * plan.tokens >= block_of(params.blocks, item.block).y) return false;
  const int32_t length = (tiles + pieces - 1) / pieces * plan.clusters;
  item.begin = item.piece * length;
  item.end = min(item.begin + length, total);
  return item.begin < item.end;
}

// Hands items to the other warps. One thread. `taken`: items beyond the first of each block.
template <class Storage>
__device__ void take_lookup_items(Storage& shared, const PrefillLookupParams& params,
                                  const ItemPlan& plan, uint32_t* taken) {
  const int32_t count = plan.row_tiles * plan.pieces * params.blocks.count * params.shape.kv_heads;
  const auto next = [&] { return static_cast<int32_t>(gridDim.x + atomicAdd(taken, 1u)); };
  RingPosition<2> ring;
  LookupItem item;
  auto index = static_cast<int32_t>(blockIdx.x);
  do {
    while (index < count && !lookup_item(params, plan, index, item)) index = next();
    if (index >= count) item.block = -1;
    ptx::mbarrier_wait_parity(&shared.item_empty[ring.stage], ring.parity ^ 1);
    shared.items[ring.stage] = item;
    ptx::mbarrier_arrive(&shared.item_full[ring.stage]);
    ring.advance();
    if (index < count) index = next();
  } while (item.block >= 0);
}

// Zeroes the queries of `shared` where boxes do not fill all rows of a tile: products read them all
// the same. All threads of a block, kThreads.
template <int kThreads, class Storage>
__device__ __forceinline__ void clear_queries(Storage& shared, const QueryTiles& tiles, int rows) {
  if (tiles.heads * tiles.tokens < rows) {
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(shared.queries) / 16); i += kThreads) {
      reinterpret_cast<uint4*>(shared.queries)[i] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async_shared();
  }
}

// Starts results = 64 rows at `a` times kColumns rows at `b`, transposed: descriptors of tiles
// [chunk][kRowsOfA or kColumns][kRowBytes].
template <class T, int kDim, int kRowsOfA, int kColumns>
__device__ __forceinline__ void start_product(float (&results)[kColumns / 2], uint64_t a,
                                              uint64_t b) {
  ptx::fence_registers(results);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const int chunk = k / 4, within = k % 4 * 32;
    ptx::WgmmaProduct<T, kColumns>::template multiply<0>(
        results, a + ((chunk * kRowsOfA * kRowBytes + within) >> 4),
        b + ((chunk * kColumns * kRowBytes + within) >> 4), k > 0);
  }
  ptx::wgmma_commit_group();
}

}  // namespace sqz::cuda::prefill
