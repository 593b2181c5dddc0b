// A block of threads unpacks neighbouring slots of a KV head. Rows of 8 bits: a thread has 8
// numbers at a time. Rows of 4 bits are turned back: a thread has dimension i of kTogether rows.
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/unpack_rows/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256, kTogether = 16, kMostDim = 256;
constexpr int kTurnedRows = 32;  // of a block, of those that are turned back
constexpr int rows_of_block(bool turned) {
  return turned ? kTurnedRows : 128;
}

// Clusters that begin at `slot` or before it; the last of them holds it.
__device__ uint32_t clusters_up_to(const uint32_t* offsets, uint32_t clusters, uint32_t slot) {
  uint32_t low = 0, high = clusters;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (offsets[middle] <= slot) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ float level_of(uint32_t code) {
  // Levels of 4 bits are those of the other sign backwards.
  const uint32_t i = code < 8 ? 7 - code : code - 8;
  const uint32_t four = i < 4 ? 0x2C1F1206 : 0x7F604B3A;  // 6 18 31 44, 58 75 96 127
  const auto level = static_cast<float>(four >> (8 * (i % 4)) & 0xFF);
  return code < 8 ? -level : level;
}

struct Tile {
  int64_t first;  // row of [Hkv, M]
  int32_t rows;
  const uint32_t* rows_of_means;  // [rows] of [Hkv, n]
};

template <class Element>
__device__ void unpack_8(const UnpackRows& p, const Tile& tile) {
  const int32_t chunks = p.dim / 8;
  const auto* scales = static_cast<const uint16_t*>(p.rows.scales);
#pragma unroll 2
  for (int32_t i = threadIdx.x; i < tile.rows * chunks; i += kThreads) {
    const int32_t row = i / chunks, chunk = i % chunks;
    const int64_t at = (tile.first + row) * chunks + chunk;
    const uint2 codes = reinterpret_cast<const uint2*>(p.rows.codes)[at];
    const int64_t mean = int64_t{tile.rows_of_means[row]} * chunks + chunk;
    const uint4 means = static_cast<const uint4*>(p.means)[mean];
    const float scale = Element::low(scales[tile.first + row]);
    const auto pair = [&](uint32_t two, uint32_t mean_pair) {  // of the lower 16 bits
      const auto a = static_cast<float>(static_cast<int8_t>(two & 0xFF));
      const auto b = static_cast<float>(static_cast<int8_t>(two >> 8 & 0xFF));
      return Element::pack(fmaf(scale, a, Element::low(mean_pair)),
                           fmaf(scale, b, Element::high(mean_pair)));
    };
    static_cast<uint4*>(p.out)[at] =
        make_uint4(pair(codes.x, means.x), pair(codes.x >> 16, means.y), pair(codes.y, means.z),
                   pair(codes.y >> 16, means.w));
  }
}

template <class Element>
__device__ void unpack_4(const UnpackRows& p, const Tile& tile, float* numbers) {
  const int32_t bytes = p.dim / 2;
  const auto* codes = reinterpret_cast<const uint8_t*>(p.rows.codes) + tile.first * bytes;
  for (int32_t i = threadIdx.x; i < kTurnedRows * bytes; i += kThreads) {
    const int32_t row = i / bytes, byte = i % bytes;
    const uint32_t both = row < tile.rows ? codes[i] : 0;
    numbers[row * p.dim + byte] = level_of(both & 15);
    numbers[row * p.dim + byte + bytes] = level_of(both >> 4);
  }
  __syncthreads();
  const auto* scales = static_cast<const uint16_t*>(p.rows.scales);
  const auto* means = static_cast<const uint16_t*>(p.means);
  for (int32_t i = threadIdx.x; i < kTurnedRows / kTogether * p.dim; i += kThreads) {
    const int32_t x = i % p.dim, first = i / p.dim * kTogether;
    float sums[kTogether] = {};
#pragma unroll 1
    for (int32_t j = 0; j < p.dim; j += 4) {
      float turn[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) turn[k] = p.turned_back[(j + k) * p.dim + x];
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const auto& four = reinterpret_cast<const float4&>(numbers[(first + r) * p.dim + j]);
        sums[r] = fmaf(turn[0], four.x, sums[r]);
        sums[r] = fmaf(turn[1], four.y, sums[r]);
        sums[r] = fmaf(turn[2], four.z, sums[r]);
        sums[r] = fmaf(turn[3], four.w, sums[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const int32_t row = first + r;
      if (row >= tile.rows) break;
      const float scale = Element::low(scales[tile.first + row]);
      const float mean = Element::low(means[int64_t{tile.rows_of_means[row]} * p.dim + x]);
      static_cast<uint16_t*>(p.out)[(tile.first + row) * p.dim + x] =
          static_cast<uint16_t>(Element::pack(fmaf(scale, sums[r], mean), 0));
    }
  }
}

template <class Element, bool kTurned>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const __grid_constant__ UnpackRows p) {
  constexpr int kRows = rows_of_block(kTurned);
  __shared__ uint32_t rows_of_means[kRows];
  __shared__ alignas(16) float numbers[kTurned ? kTurnedRows * kMostDim : 1];
  const int64_t tiles = (p.slots + kRows - 1) / kRows, head = blockIdx.x / tiles;
  const int64_t slot = blockIdx.x % tiles * kRows;
  const auto rows = static_cast<int32_t>(min(p.slots - slot, int64_t{kRows}));
  if (threadIdx.x < rows) {
    const uint32_t* offsets = p.finest.offsets + head * (p.finest.clusters + 1);
    const uint32_t cluster =
        clusters_up_to(offsets, p.finest.clusters, static_cast<uint32_t>(slot) + threadIdx.x) - 1;
    rows_of_means[threadIdx.x] = static_cast<uint32_t>(head) * p.finest.clusters + cluster;
  }
  __syncthreads();
  const Tile tile = {head * p.slots + slot, rows, rows_of_means};
  if constexpr (kTurned) {
    unpack_4<Element>(p, tile, numbers);
  } else {
    unpack_8<Element>(p, tile);
  }
}

// A warp a pair; one in all without lists.
__global__ void count_means_kernel(RunLists lists, FinestClusters finest, int64_t blocks,
                                   unsigned long long* vectors) {
  unsigned long long count = 0;
  if (lists.totals == nullptr) {
    if (threadIdx.x == 0) count = 2ull * blocks * finest.kv_heads * finest.clusters;
  } else {
    const int64_t pair = blockIdx.x, list = pair * (lists.capacity + 1);
    const uint32_t n = finest.clusters;
    const uint32_t* offsets = finest.offsets + pair % finest.kv_heads * (int64_t{n} + 1);
    for (uint32_t run = threadIdx.x; run < lists.totals[pair].runs; run += 32) {
      const uint32_t first = lists.first[list + run];
      const uint32_t keys = lists.before[list + run + 1] - lists.before[list + run];
      count += clusters_up_to(offsets, n, first + keys - 1) - clusters_up_to(offsets, n, first) + 1;
    }
  }
  if (count > 0) atomicAdd(vectors, count);
}

template <class Element>
Status launch_unpack(const UnpackRows& call, cudaStream_t stream) {
  const bool turned = call.rows.rotated();
  const int rows = rows_of_block(turned);
  const int64_t blocks = call.finest.kv_heads * ((call.slots + rows - 1) / rows);
  return launch_blocks(turned ? unpack_kernel<Element, true> : unpack_kernel<Element, false>,
                       static_cast<unsigned>(blocks), kThreads, 0, Device(), stream, call);
}

}  // namespace

Status unpack_rows(const UnpackRows& call, cudaStream_t stream) {
  if (call.slots == 0) return {};
  return call.dtype == DType::kBF16 ? launch_unpack<Bf16>(call, stream)
                                    : launch_unpack<F16>(call, stream);
}

Status count_means(const RunLists& lists, const FinestClusters& finest, int64_t blocks,
                   unsigned long long* vectors, cudaStream_t stream) {
  const int64_t pairs = lists.totals == nullptr ? 1 : blocks * finest.kv_heads;
  return launch_blocks(count_means_kernel, static_cast<unsigned>(pairs), 32, 0, Device(), stream,
                       lists, finest, blocks, vectors);
}

}  // namespace sqz::cuda
