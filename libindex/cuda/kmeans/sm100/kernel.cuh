// Points and tiles of centroids lie in shared memory as the copy engine brings them; one thread
// multiplies them, and the products of a tile come from tensor memory to the registers of the
// search warps while those of the next one are worked out.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "libindex/cuda/kmeans/common/search.cuh"
#include "libindex/cuda/kmeans/sm100/config.h"
#include "libindex/cuda/kmeans/sm100/kernel.h"
#include "libruntime/cuda/driver.h"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/prefill/common/ring.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async_bulk.cuh"
#include "libruntime/kernels/cuda/ptx/tcgen05.cuh"

namespace sqz::cuda::sm100 {

// Work of the persistent blocks: kBlockRows points each, head after head.
struct Blocks {
  int per_head, total, tiles;

  template <class Config>
  static __host__ __device__ Blocks of(const AssignParams& params) {
    const int per_head = (params.points_per_head + kBlockRows - 1) / kBlockRows;
    return {per_head, per_head * params.heads,
            (params.clusters + Config::kTile - 1) / Config::kTile};
  }
};

// One thread.
template <class Config>
__device__ void fetch(SharedStorage<Config>& shared, const AssignParams& params,
                      const CUtensorMap& points_map, const CUtensorMap& centroids_map) {
  const Blocks blocks = Blocks::of<Config>(params);
  const uint64_t once = ptx::createpolicy_evict_first(), often = ptx::createpolicy_evict_last();
  RingPosition<Config::kStages> ring;
  RingPosition<1> points;
  for (int block = blockIdx.x; block < blocks.total; block += gridDim.x, points.advance()) {
    const int head = block / blocks.per_head;
    ptx::mbarrier_wait_parity(&shared.points_empty, points.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(&shared.points_full, Config::kPointBytes);
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      ptx::cp_async_bulk_tensor_3d(shared.points[chunk], &points_map, chunk * Config::kChunk,
                                   block % blocks.per_head * kBlockRows, head, &shared.points_full,
                                   once);
    }
    for (int tile = 0; tile < blocks.tiles; ++tile, ring.advance()) {
      uint64_t* full = &shared.full[ring.stage];
      ptx::mbarrier_wait_parity(&shared.empty[ring.stage], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Config::kTileBytes);
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        ptx::cp_async_bulk_tensor_3d(shared.centroids[ring.stage][chunk], &centroids_map,
                                     chunk * Config::kChunk, tile * Config::kTile, head, full,
                                     often);
      }
    }
  }
}

// One thread.
template <class Config>
__device__ void multiply(SharedStorage<Config>& shared, const AssignParams& params) {
  constexpr int kStepsPerChunk = Config::kChunk / 16;
  const Blocks blocks = Blocks::of<Config>(params);
  const auto descriptor = [](const uint8_t* chunk, int k) {
    return ptx::tcgen05_matrix_descriptor<Config::kRowBytes>(ptx::shared_address(chunk)) +
           (k % kStepsPerChunk * 32 >> 4);
  };
  RingPosition<Config::kStages> ring;
  RingPosition<kAccumulators> results;
  RingPosition<1> points;
  for (int block = blockIdx.x; block < blocks.total; block += gridDim.x, points.advance()) {
    ptx::mbarrier_wait_parity(&shared.points_full, points.parity);
    for (int tile = 0; tile < blocks.tiles; ++tile, ring.advance(), results.advance()) {
      ptx::mbarrier_wait_parity(&shared.full[ring.stage], ring.parity);
      ptx::mbarrier_wait_parity(&shared.taken[results.stage], results.parity ^ 1);
      ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
      for (int k = 0; k < Config::kDim / 16; ++k) {
        ptx::tcgen05_mma_f16(shared.columns + results.stage * Config::kTile,
                             descriptor(shared.points[k / kStepsPerChunk], k),
                             descriptor(shared.centroids[ring.stage][k / kStepsPerChunk], k),
                             ptx::kTcgen05Bf16<kBlockRows, Config::kTile>, k > 0);
      }
      ptx::tcgen05_commit(&shared.empty[ring.stage]);
      ptx::tcgen05_commit(&shared.done[results.stage]);
    }
    ptx::tcgen05_commit(&shared.points_empty);
  }
}

template <class Config>
__device__ void search(SharedStorage<Config>& shared, const AssignParams& params) {
  constexpr int kTile = Config::kTile;
  const Blocks blocks = Blocks::of<Config>(params);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // The point of the block whose search this lane keeps (search.cuh): slots are 16 lanes of tensor
  // memory.
  const int own_row = 32 * warp + 16 * (lane >> 1 & 1) + 8 * (lane & 1) + (lane >> 2);
  const uint32_t columns = shared.columns + (32u * warp << 16);
  RingPosition<kAccumulators> results;
  PendingRank pending;  // of the block before
  for (int block = blockIdx.x; block < blocks.total; block += gridDim.x) {
    const int head = block / blocks.per_head;
    const int point = block % blocks.per_head * kBlockRows + own_row;
    const bool real = point < params.points_per_head;
    const int64_t index = static_cast<int64_t>(head) * params.points_per_head + point;
    const float inverse_norm = real ? params.inverse_norms[index] : 0.0f;
    RowSearch row = start_row(inverse_norm, Config::kDim);
    for (int tile = 0; tile < blocks.tiles; ++tile, results.advance()) {
      ptx::mbarrier_wait_parity(&shared.done[results.stage], results.parity);
      ptx::tcgen05_fence_after_thread_sync();
      float products[2][kTile / 2];
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
#pragma unroll
        for (int part = 0; part < kTile / 32; ++part) {
          ptx::tcgen05_ld_16x256b_x4(
              columns + (16u * slot << 16) + results.stage * kTile + 32 * part,
              products[slot] + 16 * part);
        }
      }
      ptx::tcgen05_wait_ld();
      ptx::tcgen05_fence_before_thread_sync();
      ptx::mbarrier_arrive_warp(&shared.taken[results.stage]);
      const int first = tile * kTile;
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        if (first + kTile > params.clusters) {
          mask_columns<kTile>(products[slot], params.clusters - first);
        }
      }
      search_tiles<kTile, 0, 2>(products, static_cast<uint32_t>(first), row);
    }
    pending.note(params);
    pending = real ? finish_row(params, row, head, point, inverse_norm) : PendingRank();
  }
  pending.note(params);
}

template <class Config>
__global__ void __launch_bounds__(kThreads, 1)
    assign_kernel(const __grid_constant__ AssignParams params,
                  const __grid_constant__ CUtensorMap points_map,
                  const __grid_constant__ CUtensorMap centroids_map) {
#ifdef __CUDA_ARCH_FEAT_SM100_ALL
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.points_full, 1);
    ptx::mbarrier_init(&shared.points_empty, 1);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], 1);
    }
    for (int i = 0; i < kAccumulators; ++i) {
      ptx::mbarrier_init(&shared.done[i], 1);
      ptx::mbarrier_init(&shared.taken[i], kSearchWarps * ptx::kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  if (warp == kSearchWarps) ptx::tcgen05_alloc(&shared.columns, Config::kColumns);
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  if (warp < kSearchWarps) {
    search(shared, params);
  } else if (threadIdx.x == 32 * kSearchWarps) {
    multiply(shared, params);
  } else if (threadIdx.x == 32 * kSearchWarps + 32) {
    fetch(shared, params, points_map, centroids_map);
  }
  __syncwarp();
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  if (warp == kSearchWarps) ptx::tcgen05_dealloc(shared.columns, Config::kColumns);
#endif
}

template <int kDim>
Status launch_assign(const AssignParams& params, int multiprocessors, cudaStream_t stream) {
  using Config = Config<kDim>;
  constexpr size_t kShared = sizeof(SharedStorage<Config>);
  static_assert(kShared <= kSharedLimit);
  CUtensorMap points_map, centroids_map;
  SQZ_RETURN_IF_ERROR(encode_rows(points_map, params.points, params.heads, params.points_per_head,
                                  kDim, kBlockRows, Config::kRowBytes));
  SQZ_RETURN_IF_ERROR(encode_rows(centroids_map, params.centroids, params.heads, params.clusters,
                                  kDim, Config::kTile, Config::kRowBytes));
  const int grid = std::min(Blocks::of<Config>(params).total, multiprocessors);
  return launch_blocks(assign_kernel<Config>, grid, kThreads, kShared, Device(), stream, params,
                       points_map, centroids_map);
}

}  // namespace sqz::cuda::sm100
