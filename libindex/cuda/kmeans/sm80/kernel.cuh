#pragma once

#include "libindex/cuda/kmeans/common/search.cuh"
#include "libindex/cuda/kmeans/sm80/config.h"
#include "libindex/cuda/kmeans/sm80/kernel.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/ldmatrix.cuh"
#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"
#include "libruntime/kernels/cuda/ptx/mma.cuh"

namespace sqz::cuda::sm80 {

// Starts the copy of the tile of centroids whose first one is `first`; zeros past the last.
template <class Config>
__device__ __forceinline__ void start_tile(uint8_t* tile, const __nv_bfloat16* centroids, int first,
                                           int clusters) {
  constexpr int kPieces = Config::kDim / 8;  // of 16 bytes in a row
  for (int i = threadIdx.x; i < kTile * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool real = first + row < clusters;
    const __nv_bfloat16* source =
        centroids + static_cast<int64_t>(real ? first + row : 0) * Config::kDim + 8 * piece;
    ptx::cp_async_16(ptx::shared_address(tile + row * Config::kRowBytes + 16 * piece), source,
                     real ? 16 : 0);
  }
  ptx::cp_async_commit_group();
}

template <class Config>
__global__ void __launch_bounds__(kThreads) assign_kernel(const AssignParams params) {
  extern __shared__ __align__(16) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int head = blockIdx.y;
  const int first_row = blockIdx.x * kBlockRows + 16 * warp;
  const int64_t head_points = static_cast<int64_t>(head) * params.points_per_head;
  const __nv_bfloat16* centroids =
      params.centroids + static_cast<int64_t>(head) * params.clusters * Config::kDim;

  uint32_t points[Config::kSteps][4];
#pragma unroll
  for (int k = 0; k < Config::kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + (lane >> 2) + 8 * (i & 1);
      const int column = 16 * k + 2 * (lane & 3) + 8 * (i >> 1);
      points[k][i] = row < params.points_per_head
                         ? *reinterpret_cast<const uint32_t*>(
                               params.points + (head_points + row) * Config::kDim + column)
                         : 0;
    }
  }
  const int own_row = first_row + (lane >> 2) + 8 * (lane & 1);
  const bool real = own_row < params.points_per_head && (lane & 2) == 0;
  const float inverse_norm = real ? params.inverse_norms[head_points + own_row] : 0.0f;
  RowSearch row = start_row(inverse_norm, Config::kDim);

  const int tiles = (params.clusters + kTile - 1) / kTile;
  start_tile<Config>(shared.centroids[0], centroids, 0, params.clusters);
  for (int t = 0; t < tiles; ++t) {
    if (t + 1 < tiles) {
      start_tile<Config>(shared.centroids[(t + 1) % kStages], centroids, (t + 1) * kTile,
                         params.clusters);
      ptx::cp_async_wait_group<1>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    __syncthreads();
    // Lane 8 i + r of an ldmatrix gives row r of matrix i: two groups of eight centroids, two
    // halves of the 16 dimensions.
    const uint32_t base = ptx::shared_address(shared.centroids[t % kStages]) +
                          ((lane & 7) + ((lane >> 4) << 3)) * Config::kRowBytes +
                          ((lane >> 3) & 1) * 16;
    float products[1][kTile / 2] = {};
    auto& tile = products[0];
#pragma unroll
    for (int k = 0; k < Config::kSteps; ++k) {
#pragma unroll
      for (int j = 0; j < kTile / 8; j += 2) {
        uint32_t fragment[4];
        ptx::ldmatrix_x4(fragment, base + 8 * j * Config::kRowBytes + 32 * k);
        ptx::mma_m16n8k16(tile + 4 * j, points[k], fragment[0], fragment[1]);
        ptx::mma_m16n8k16(tile + 4 * j + 4, points[k], fragment[2], fragment[3]);
      }
    }
    if (t + 1 == tiles) mask_columns<kTile>(tile, params.clusters - t * kTile);
    search_tiles<kTile, 0, 1>(products, t * kTile, row);
    __syncthreads();
  }
  if (real) finish_row(params, row, head, own_row, inverse_norm).note(params);
}

template <int kDim>
Status launch_assign(const AssignParams& params, cudaStream_t stream) {
  using Config = Config<kDim>;
  constexpr size_t kShared = sizeof(SharedStorage<Config>);
  static_assert(kShared <= kLeastBlockShared);
  auto* kernel = assign_kernel<Config>;
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  const dim3 grid((params.points_per_head + kBlockRows - 1) / kBlockRows, params.heads);
  kernel<<<grid, kThreads, kShared, stream>>>(params);
  return cuda_status(cudaGetLastError(), "assign kernel, compute capability 8.0");
}

}  // namespace sqz::cuda::sm80
