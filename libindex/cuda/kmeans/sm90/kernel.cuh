#pragma once

#include <cuda.h>

#include "libindex/cuda/cuda_status.h"
#include "libindex/cuda/kmeans/common/search.cuh"
#include "libindex/cuda/kmeans/sm90/config.h"
#include "libindex/cuda/kmeans/sm90/kernel.h"
#include "libindex/cuda/ptx/barrier.cuh"
#include "libindex/cuda/ptx/cp_async_bulk_tensor.cuh"
#include "libindex/cuda/ptx/ldmatrix.cuh"
#include "libindex/cuda/ptx/mbarrier.cuh"
#include "libindex/cuda/ptx/setmaxnreg.cuh"
#include "libindex/cuda/ptx/wgmma_m64n112k16.cuh"
#include "libindex/cuda/ptx/wgmma_m64n120k16.cuh"
#include "libindex/cuda/ptx/wgmma_m64n128k16.cuh"
#include "libindex/cuda/ptx/wgmma_m64n96k16.cuh"
#include "libindex/cuda/tensor_map.h"

namespace sqz::cuda::sm90 {

// Work of the persistent blocks: blocks of kBlockRows points, head after head, so that the
// centroids of one or two heads are in use at a time and stay in L2.
struct Blocks {
  int per_head, total, tiles;

  template <class Config>
  static __device__ Blocks of(const AssignParams& params) {
    Blocks blocks;
    blocks.per_head = (params.points_per_head + kBlockRows - 1) / kBlockRows;
    blocks.total = blocks.per_head * params.heads;
    blocks.tiles = (params.clusters + Config::kTile - 1) / Config::kTile;
    return blocks;
  }
};

// A stage of the ring and the parity of its current round.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class Config>
__device__ void produce(SharedStorage<Config>& shared, const AssignParams& params,
                        const CUtensorMap& points_map, const CUtensorMap& centroids_map) {
  const Blocks blocks = Blocks::of<Config>(params);
  const uint64_t once = ptx::createpolicy_evict_first();
  const uint64_t often = ptx::createpolicy_evict_last();
  RingPosition<Config::kStages> ring;
  uint32_t points_parity = 0;
  for (int block = blockIdx.x; block < blocks.total; block += gridDim.x) {
    const int head = block / blocks.per_head;
    const int row = block % blocks.per_head * kBlockRows;
    ptx::mbarrier_wait_parity(&shared.points_empty, points_parity ^ 1);
    points_parity ^= 1;
    ptx::mbarrier_arrive_expect_tx(&shared.points_full, Config::kPointBytes);
    for (int slot = 0; slot < kSlots; ++slot) {
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        ptx::cp_async_bulk_tensor_3d(shared.points[slot][chunk], &points_map,
                                     chunk * Config::kChunk, row + slot * kSlotRows, head,
                                     &shared.points_full, once);
      }
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

// The A operand of one consumer warpgroup: kSlots fragments of 64 points.
template <class Config, bool kInRegisters = Config::kPointsInRegisters>
class Points {
 public:
  // Reads this warp's 16 rows of each slot from the swizzled tile.
  __device__ __forceinline__ void load(const SharedStorage<Config>& shared, int warpgroup) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int row = 64 * warpgroup + 16 * warp + (lane & 15);
    constexpr uint32_t kMask = Config::kRowBytes == 128 ? 0x70 : 0x30;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int k = 0; k < Config::kSteps; ++k) {
        constexpr int kStepsPerChunk = Config::kChunk / 16;
        const uint32_t base = ptx::shared_address(shared.points[slot][k / kStepsPerChunk]);
        const uint32_t offset =
            row * Config::kRowBytes + (k % kStepsPerChunk) * 32 + (lane >> 4) * 16;
        ptx::ldmatrix_x4(fragments_[slot][k], base + (offset ^ ((offset >> 3) & kMask)));
      }
    }
  }

  template <int kSlot>
  __device__ __forceinline__ void multiply(float (&tile)[Config::kTile / 2], int k,
                                           uint64_t centroids) const {
    ptx::Wgmma<Config::kTile>::multiply(tile, fragments_[kSlot][k], centroids, k > 0);
  }

 private:
  uint32_t fragments_[kSlots][Config::kSteps][4];
};

template <class Config>
class Points<Config, false> {
 public:
  __device__ __forceinline__ void load(const SharedStorage<Config>& shared, int warpgroup) {
    for (int slot = 0; slot < kSlots; ++slot) {
      descriptors_[slot] = ptx::matrix_descriptor<Config::kRowBytes>(
          ptx::shared_address(shared.points[slot][0]) + 64 * warpgroup * Config::kRowBytes);
    }
  }

  template <int kSlot>
  __device__ __forceinline__ void multiply(float (&tile)[Config::kTile / 2], int k,
                                           uint64_t centroids) const {
    constexpr int kStepsPerChunk = Config::kChunk / 16;
    const uint64_t offset = (k / kStepsPerChunk * kSlotRows * Config::kRowBytes +
                             k % kStepsPerChunk * 32) >> 4;
    ptx::Wgmma<Config::kTile>::multiply(tile, descriptors_[kSlot] + offset, centroids, k > 0);
  }

 private:
  uint64_t descriptors_[kSlots];
};

// Starts tile = points of kSlot times the centroids of a stage; one group of products in flight.
template <int kSlot, class Config>
__device__ __forceinline__ void start_products(float (&tile)[Config::kTile / 2],
                                               const Points<Config>& points,
                                               uint64_t centroids) {
  constexpr int kStepsPerChunk = Config::kChunk / 16;
  ptx::fence_registers(tile);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Config::kSteps; ++k) {
    const uint64_t offset = (k / kStepsPerChunk * Config::kTile * Config::kRowBytes +
                             k % kStepsPerChunk * 32) >> 4;
    points.template multiply<kSlot>(tile, k, centroids + offset);
  }
  ptx::wgmma_commit_group();
}

// Takes finished products with tile `tile` of the centroids into account.
template <int kSlot, class Config>
__device__ __forceinline__ void search_products(float (&products)[Config::kTile / 2], int tile,
                                                int clusters, RowSearch& row) {
  const int first = tile * Config::kTile;
  ptx::fence_registers(products);
  if (first + Config::kTile > clusters) mask_columns<Config::kTile>(products, clusters - first);
  search_tile<Config::kTile, kSlot>(products, static_cast<uint32_t>(first), row);
}

template <class Config>
__device__ void consume(SharedStorage<Config>& shared, const AssignParams& params, int warpgroup) {
  constexpr int kTile = Config::kTile;
  const Blocks blocks = Blocks::of<Config>(params);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  // The row of the block whose search this lane keeps: see search.cuh.
  const int own_row = ((lane >> 1) & 1) * kSlotRows + 64 * warpgroup + 16 * warp + 8 * (lane & 1) +
                      (lane >> 2);
  const uint64_t first_stage =
      ptx::matrix_descriptor<Config::kRowBytes>(ptx::shared_address(shared.centroids[0][0]));
  auto centroids = [&](int stage) {
    return first_stage + static_cast<uint64_t>(stage * (Config::kTileBytes >> 4));
  };
  auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };

  RowSearch row;
  PendingRank pending;  // of the block before
  RingPosition<Config::kStages> ring;
  uint32_t points_parity = 0;
  float tile0[kTile / 2], tile1[kTile / 2];
#if SQZ_PP > 0
  if (warpgroup == 1 && static_cast<int>(blockIdx.x) < blocks.total) {
    ptx::barrier_arrive<kConsumerThreads>(kTurn);
  }
#endif
  for (int block = blockIdx.x; block < blocks.total; block += gridDim.x) {
    const int head = block / blocks.per_head;
    const int point = block % blocks.per_head * kBlockRows + own_row;
    const bool real = point < params.points_per_head;
    const float inverse_norm =
        real ? params.inverse_norms[static_cast<int64_t>(head) * params.points_per_head + point]
             : 0.0f;
    row = start_row(inverse_norm, Config::kDim);

    Points<Config> points;
    ptx::mbarrier_wait_parity(&shared.points_full, points_parity);
    points_parity ^= 1;
    points.load(shared, warpgroup);
    if constexpr (Config::kPointsInRegisters) release(&shared.points_empty);


    // The warpgroups take turns at starting products, so that one searches while the other's run.
    // (Keeping products in flight from one round of the loop to the next would save no more, and
    // makes the compiler serialise all of them.)
    const bool last_block = block + static_cast<int>(gridDim.x) >= blocks.total;
    for (int tile = 0; tile < blocks.tiles; ++tile, ring.advance()) {
      ptx::mbarrier_wait_parity(&shared.full[ring.stage], ring.parity);
#if SQZ_PP > 0
      ptx::barrier_sync<kConsumerThreads>(kTurn + warpgroup);
#endif
      start_products<0>(tile0, points, centroids(ring.stage));
      start_products<1>(tile1, points, centroids(ring.stage));
#if SQZ_PP == 1
      if (warpgroup == 0 || !last_block || tile + 1 < blocks.tiles) {
        ptx::barrier_arrive<kConsumerThreads>(kTurn + 1 - warpgroup);
      }
#endif
      ptx::wgmma_wait_group<1>();
#if SQZ_PP == 2
      if (warpgroup == 0 || !last_block || tile + 1 < blocks.tiles) {
        ptx::barrier_arrive<kConsumerThreads>(kTurn + 1 - warpgroup);
      }
#endif
      search_products<0, Config>(tile0, tile, params.clusters, row);
      ptx::wgmma_wait_group<0>();
      release(&shared.empty[ring.stage]);
      search_products<1, Config>(tile1, tile, params.clusters, row);
    }
    if constexpr (!Config::kPointsInRegisters) release(&shared.points_empty);
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
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&points_map);
    ptx::prefetch_tensormap(&centroids_map);
    ptx::mbarrier_init(&shared.points_full, 1);
    ptx::mbarrier_init(&shared.points_empty, kConsumerWarps);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) produce(shared, params, points_map, centroids_map);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(shared, params, warpgroup - 1);
  }
}

template <class Config>
Status launch(const AssignParams& params, int multiprocessors, cudaStream_t stream) {
  constexpr size_t kShared = sizeof(SharedStorage<Config>);
  static_assert(kShared <= kSharedLimit);
  CUtensorMap points_map, centroids_map;
  SQZ_RETURN_IF_ERROR(encode_rows(points_map, params.points, params.heads, params.points_per_head,
                                  Config::kDim, kSlotRows, Config::kRowBytes));
  SQZ_RETURN_IF_ERROR(encode_rows(centroids_map, params.centroids, params.heads, params.clusters,
                                  Config::kDim, Config::kTile, Config::kRowBytes));
  auto* kernel = assign_kernel<Config>;
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  const int64_t blocks =
      int64_t{params.heads} * ((params.points_per_head + kBlockRows - 1) / kBlockRows);
  const int grid = static_cast<int>(blocks < multiprocessors ? blocks : multiprocessors);
  kernel<<<grid, kThreads, kShared, stream>>>(params, points_map, centroids_map);
  return cuda_status(cudaGetLastError(), "assign kernel, compute capability 9.0");
}

template <int kDim>
Status launch_assign(const AssignParams& params, int multiprocessors, cudaStream_t stream) {
  if constexpr (kDim == 256) {
    return launch<Config<256, 96>>(params, multiprocessors, stream);
  } else {
    // The tile that leaves the fewest columns of the last one unused; among equals the largest.
    auto columns = [&](int tile) { return (params.clusters + tile - 1) / tile * tile; };
    if (columns(120) < columns(128) && columns(120) <= columns(112)) {
      return launch<Config<kDim, 120>>(params, multiprocessors, stream);
    }
    if (columns(112) < columns(128)) {
      return launch<Config<kDim, 112>>(params, multiprocessors, stream);
    }
    return launch<Config<kDim, 128>>(params, multiprocessors, stream);
  }
}

}  // namespace sqz::cuda::sm90
