#pragma once

#include <cuda.h>

#include "libindex/cuda/kmeans/common/search.cuh"
#include "libindex/cuda/kmeans/sm90/config.h"
#include "libindex/cuda/kmeans/sm90/kernel.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/driver.h"
#include "libruntime/kernels/cuda/prefill/common/ring.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async_bulk.cuh"
#include "libruntime/kernels/cuda/ptx/ldmatrix.cuh"
#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"
#include "libruntime/kernels/cuda/ptx/setmaxnreg.cuh"
#include "libruntime/kernels/cuda/ptx/wgmma_product.cuh"

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

// Number within its head of the point at a place of a head; -1 past the last.
template <class Config>
__device__ __forceinline__ int point_at(const AssignParams& params, int head, int place) {
  if (place >= params.points_per_head) return -1;
  if (!Config::kPointsInRegisters || params.by_label == nullptr) return place;
  return static_cast<int>(
      params.by_label[static_cast<int64_t>(head) * params.points_per_head + place] & kPointBits);
}

// The loader warps: points of a block, row by row, in the order given.
template <class Config>
__device__ void load_points(SharedStorage<Config>& shared, const AssignParams& params) {
  constexpr int kPieces = Config::kDim / 8;  // of 16 bytes in a row
  constexpr int kUnroll = 8;
  const Blocks blocks = Blocks::of<Config>(params);
  const int thread = threadIdx.x - 32;
  uint32_t parity = 0;
  for (int block = blockIdx.x; block < blocks.total; block += gridDim.x, parity ^= 1) {
    const int head = block / blocks.per_head;
    const int place = block % blocks.per_head * kBlockRows;
    const __nv_bfloat16* points =
        params.points + static_cast<int64_t>(head) * params.points_per_head * Config::kDim;
    ptx::mbarrier_wait_parity(&shared.points_empty, parity ^ 1);
    for (int first = thread; first < kBlockRows * kPieces; first += kUnroll * kLoaderThreads) {
      int numbers[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int row = (first + u * kLoaderThreads) / kPieces;
        numbers[u] = row < kBlockRows ? point_at<Config>(params, head, place + row) : -1;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int i = first + u * kLoaderThreads, row = i / kPieces, piece = i % kPieces;
        if (row >= kBlockRows) break;
        ptx::cp_async_16(
            ptx::shared_address(shared.points[0]) + row * Config::kPointRowBytes + 16 * piece,
            points + static_cast<int64_t>(max(numbers[u], 0)) * Config::kDim + 8 * piece,
            numbers[u] < 0 ? 0 : 16);
      }
    }
    ptx::cp_async_mbarrier_arrive_noinc(&shared.points_full);
  }
}

// The tile of centroids that a block starts with. Points in the order of their labels have their
// best centroids in the same one or two tiles; starting there, the searches see little that is
// better in the others.
template <class Config>
__device__ __forceinline__ int first_tile(const AssignParams& params, const Blocks& blocks,
                                          int block) {
  if (!Config::kPointsInRegisters || params.by_label == nullptr || block >= blocks.total) return 0;
  const int head = block / blocks.per_head;
  const int point = point_at<Config>(params, head, block % blocks.per_head * kBlockRows);
  return static_cast<int>(
             params.labels[static_cast<int64_t>(head) * params.points_per_head + point]) /
         Config::kTile;
}

// The producer thread: centroids, and points where they come as they lie.
template <class Config>
__device__ void produce(SharedStorage<Config>& shared, const AssignParams& params,
                        const CUtensorMap& points_map, const CUtensorMap& centroids_map) {
  const Blocks blocks = Blocks::of<Config>(params);
  const uint64_t often = ptx::createpolicy_evict_last();
  RingPosition<Config::kStages> ring;
  uint32_t points_parity = 0;
  int next_tile = first_tile<Config>(params, blocks, blockIdx.x);
  for (int block = blockIdx.x; block < blocks.total; block += gridDim.x) {
    const int head = block / blocks.per_head;
    int tile = next_tile;
    next_tile = first_tile<Config>(params, blocks, block + gridDim.x);
    if constexpr (!Config::kPointsInRegisters) {
      ptx::mbarrier_wait_parity(&shared.points_empty, points_parity ^ 1);
      points_parity ^= 1;
      ptx::mbarrier_arrive_expect_tx(&shared.points_full, Config::kPointBytes);
      const uint64_t once = ptx::createpolicy_evict_first();
      for (int slot = 0; slot < kSlots; ++slot) {
        for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
          ptx::cp_async_bulk_tensor_3d(shared.points[slot] + chunk * kSlotRows * Config::kRowBytes,
                                       &points_map, chunk * Config::kChunk,
                                       block % blocks.per_head * kBlockRows + slot * kSlotRows,
                                       head, &shared.points_full, once);
        }
      }
    }
    for (int i = 0; i < blocks.tiles; ++i, ring.advance()) {
      uint64_t* full = &shared.full[ring.stage];
      ptx::mbarrier_wait_parity(&shared.empty[ring.stage], ring.parity ^ 1);
      shared.tile[ring.stage] = tile;
      ptx::mbarrier_arrive_expect_tx(full, Config::kTileBytes);
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        ptx::cp_async_bulk_tensor_3d(shared.centroids[ring.stage][chunk], &centroids_map,
                                     chunk * Config::kChunk, tile * Config::kTile, head, full,
                                     often);
      }
      tile = tile + 1 == blocks.tiles ? 0 : tile + 1;
    }
  }
}

// The A operand of one consumer warpgroup: kSlots fragments of 64 points.
template <class Config, bool kInRegisters = Config::kPointsInRegisters>
class Points {
 public:
  __device__ __forceinline__ void load(const SharedStorage<Config>& shared, int warpgroup) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int row = 64 * warpgroup + 16 * warp + (lane & 15);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const uint32_t address = ptx::shared_address(shared.points[slot]) +
                               row * Config::kPointRowBytes + (lane >> 4) * 16;
#pragma unroll
      for (int k = 0; k < Config::kSteps; ++k) {
        ptx::ldmatrix_x4(fragments_[slot][k], address + 32 * k);
      }
    }
  }

  template <int kSlot>
  __device__ __forceinline__ void multiply(float (&tile)[Config::kTile / 2], int k,
                                           uint64_t centroids) const {
    ptx::WgmmaProduct<__nv_bfloat16, Config::kTile>::template multiply<0>(
        tile, fragments_[kSlot][k], centroids, k > 0);
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
          shared.points[slot] + 64 * warpgroup * Config::kRowBytes);
    }
  }

  template <int kSlot>
  __device__ __forceinline__ void multiply(float (&tile)[Config::kTile / 2], int k,
                                           uint64_t centroids) const {
    constexpr int kStepsPerChunk = Config::kChunk / 16;
    const uint64_t offset =
        (k / kStepsPerChunk * kSlotRows * Config::kRowBytes + k % kStepsPerChunk * 32) >> 4;
    ptx::WgmmaProduct<__nv_bfloat16, Config::kTile>::template multiply<0>(
        tile, descriptors_[kSlot] + offset, centroids, k > 0);
  }

 private:
  uint64_t descriptors_[kSlots];
};

// Starts tile = points of kSlot times the centroids of a stage; one group of products in flight.
template <int kSlot, class Config>
__device__ __forceinline__ void start_products(float (&tile)[Config::kTile / 2],
                                               const Points<Config>& points, uint64_t centroids) {
  constexpr int kStepsPerChunk = Config::kChunk / 16;
  ptx::fence_registers(tile);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Config::kSteps; ++k) {
    const uint64_t offset =
        (k / kStepsPerChunk * Config::kTile * Config::kRowBytes + k % kStepsPerChunk * 32) >> 4;
    points.template multiply<kSlot>(tile, k, centroids + offset);
  }
  ptx::wgmma_commit_group();
}

// Takes finished products, of slots kFirst on, with tile `tile` of the centroids into account.
template <class Config, int kFirst, int kCount>
__device__ __forceinline__ void search_products(float (&products)[kCount][Config::kTile / 2],
                                                int tile, int clusters, RowSearch& row) {
  const int first = tile * Config::kTile;
#pragma unroll
  for (int slot = 0; slot < kCount; ++slot) {
    ptx::fence_registers(products[slot]);
    if (first + Config::kTile > clusters) {
      mask_columns<Config::kTile>(products[slot], clusters - first);
    }
  }
  search_tiles<Config::kTile, kFirst, kCount>(products, static_cast<uint32_t>(first), row);
}

template <class Config>
__device__ void consume(SharedStorage<Config>& shared, const AssignParams& params, int warpgroup) {
  constexpr int kTile = Config::kTile;
  const Blocks blocks = Blocks::of<Config>(params);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  // The row of the block whose search this lane keeps: see search.cuh.
  const int own_row =
      ((lane >> 1) & 1) * kSlotRows + 64 * warpgroup + 16 * warp + 8 * (lane & 1) + (lane >> 2);
  const uint64_t first_stage = ptx::matrix_descriptor<Config::kRowBytes>(shared.centroids[0][0]);
  auto centroids = [&](int stage) {
    return first_stage + static_cast<uint64_t>(stage * (Config::kTileBytes >> 4));
  };
  auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };

  RowSearch row;
  PendingRank pending;  // of the block before
  // Point and norm of this lane's row are fetched one and two blocks ahead.
  auto fetch_point = [&](int block) {
    if (block >= blocks.total) return -1;
    const int head = block / blocks.per_head;
    return point_at<Config>(params, head, block % blocks.per_head * kBlockRows + own_row);
  };
  auto fetch_norm = [&](int block, int point) {
    if (point < 0) return 0.0f;
    const int64_t head_points =
        static_cast<int64_t>(block / blocks.per_head) * params.points_per_head;
    return params.inverse_norms[head_points + point];
  };
  const int step = gridDim.x;
  int next_point = fetch_point(blockIdx.x), after_next = fetch_point(blockIdx.x + step);
  float next_norm = fetch_norm(blockIdx.x, next_point);

  RingPosition<Config::kStages> ring;
  uint32_t points_parity = 0;
  float first[1][kTile / 2], second[1][kTile / 2];
  for (int block = blockIdx.x; block < blocks.total; block += step) {
    const int point = next_point;
    const float inverse_norm = next_norm;
    next_point = after_next;
    next_norm = fetch_norm(block + step, next_point);
    after_next = fetch_point(block + 2 * step);
    row = start_row(inverse_norm, Config::kDim);

    Points<Config> points;
    ptx::mbarrier_wait_parity(&shared.points_full, points_parity);
    points_parity ^= 1;
    points.load(shared, warpgroup);
    if constexpr (Config::kPointsInRegisters) ptx::mbarrier_arrive(&shared.points_empty);

    // While one slot's products are searched the other's run, and the other warpgroup's.
    for (int i = 0; i < blocks.tiles; ++i, ring.advance()) {
      ptx::mbarrier_wait_parity(&shared.full[ring.stage], ring.parity);
      // Read by the lane that releases the stage.
      const int tile = __shfl_sync(~0u, lane == 0 ? shared.tile[ring.stage] : 0, 0);
      start_products<0>(first[0], points, centroids(ring.stage));
      start_products<1>(second[0], points, centroids(ring.stage));
      ptx::wgmma_wait_group<1>();
      search_products<Config, 0>(first, tile, params.clusters, row);
      ptx::wgmma_wait_group<0>();
      release(&shared.empty[ring.stage]);
      search_products<Config, 1>(second, tile, params.clusters, row);
    }
    if constexpr (!Config::kPointsInRegisters) release(&shared.points_empty);
    pending.note(params);
    pending = point < 0 ? PendingRank()
                        : finish_row(params, row, block / blocks.per_head, point, inverse_norm);
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
    ptx::mbarrier_init(&shared.points_full, Config::kPointsInRegisters ? kLoaderThreads : 1);
    ptx::mbarrier_init(&shared.points_empty,
                       Config::kPointsInRegisters ? 32 * kConsumerWarps : kConsumerWarps);
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
    if (threadIdx.x == 0) {
      produce(shared, params, points_map, centroids_map);
    } else if (Config::kPointsInRegisters && threadIdx.x >= 32) {
      load_points(shared, params);
    }
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
