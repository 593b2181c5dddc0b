// Products of a split matrix with weights, tile by tile: 4 warps with 64 rows and 64 columns each.
// Tiles are laid out so that a lane finds its part of an mma's operands side by side: 8 columns,
// which permutes them alike for both sides (common/rows.cuh).
#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/prefill/classify/kernel.h"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTiles = kProductTile / kWeightRows;  // rows of tiles of either side
constexpr int kRing = 3;                            // columns of tiles under way
constexpr int kWarpTiles = 8;                       // rows of tiles of a warp, of either side

struct Stage {
  uint4 rows[kTiles][2][32];
  uint4 weights[kTiles][32];
};

struct Product {
  SplitMatrix rows;  // columns as those of the weights
  const uint4* weights = nullptr;
  int64_t weight_stride = 0;  // words from a head to the next
  int32_t weight_tiles = 0;   // rows of tiles of the weights
  const float* bias = nullptr;
  int32_t bias_count = 0;  // of a head
};

// Hidden units: max(x, 0), split; zeros where a tile goes beyond the last one.
struct UnitsOut {
  SplitMatrix to;
  int32_t units = 0;

  __device__ __forceinline__ void store(int head, int64_t row, int column, const float* bias,
                                        float a, float b) const {
    if (column >= to.columns * kWeightColumns) return;
    const auto unit = [&](int at, float x) {
      if (at >= units) return 0.0f;
      x += bias[at];
      return x < 0 ? 0.0f : x;  // a NaN stays
    };
    uint32_t high, low;
    split<F16>(unit(column, a), unit(column + 1, b), high, low);
    const int within = column % kWeightColumns;
    auto* out = reinterpret_cast<uint32_t*>(
        to.words + head * to.stride +
        (row / kWeightRows * to.columns + column / kWeightColumns) * 64 + row % 8 * 4 + within / 8);
    out[within % 8 / 2] = high;
    out[128 + within % 8 / 2] = low;
  }
};

struct LogitsOut {
  float* to = nullptr;  // [Hkv, rows, width]
  int64_t stride = 0;   // of a head
  int32_t width = 0, buckets = 0;

  __device__ __forceinline__ void store(int head, int64_t row, int column, const float* bias,
                                        float a, float b) const {
    if (column >= width) return;
    const auto logit = [&](int at, float x) {
      return at < buckets ? (x + bias[at]) * 1.4426950408889634f : -INFINITY;
    };
    *reinterpret_cast<float2*>(to + head * stride + row * width + column) =
        make_float2(logit(column, a), logit(column + 1, b));
  }
};

template <class Out>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const __grid_constant__ Product call, const __grid_constant__ Out out) {
  begin_dependent();
  extern __shared__ __align__(16) char memory[];
  auto* ring = reinterpret_cast<Stage*>(memory);
  const int head = static_cast<int>(blockIdx.z), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int columns = call.rows.columns;
  const int64_t first_row = int64_t{blockIdx.x} * kTiles;  // rows of tiles
  const int first_weight = static_cast<int>(blockIdx.y) * kTiles;
  const uint4* rows = call.rows.words + head * call.rows.stride + first_row * columns * 64;
  const uint4* weights = call.weights + head * call.weight_stride;
  // Products beyond the last row of tiles are not stored.
  const auto fetch = [&](int column) {
    if (column < columns) {
      Stage& stage = ring[column % kRing];
#pragma unroll
      for (int t = 0; t < kTiles; t += 4) {
        const int tile = t + warp;
        const uint4* from = rows + (int64_t{tile} * columns + column) * 64 + lane;
        const int weight = min(first_weight + tile, call.weight_tiles - 1);
        ptx::cp_async_16(ptx::shared_address(&stage.rows[tile][0][lane]), from, 16);
        ptx::cp_async_16(ptx::shared_address(&stage.rows[tile][1][lane]), from + 32, 16);
        ptx::cp_async_16(ptx::shared_address(&stage.weights[tile][lane]),
                         weights + (int64_t{weight} * columns + column) * 32 + lane, 16);
      }
    }
    ptx::cp_async_commit_group();
  };
  const int row_tile = warp / 2 * kWarpTiles, weight_tile = warp % 2 * kWarpTiles;
  float d[kWarpTiles / 2][kWarpTiles][4] = {};
#pragma unroll
  for (int i = 0; i < kRing - 1; ++i) fetch(i);
#pragma unroll 1
  for (int column = 0; column < columns; ++column) {
    ptx::cp_async_wait_group<kRing - 2>();
    __syncthreads();  // the column is there, and the one before has been read
    fetch(column + kRing - 1);
    const Stage& stage = ring[column % kRing];
    uint4 b[kWarpTiles];
#pragma unroll
    for (int n = 0; n < kWarpTiles; ++n) b[n] = stage.weights[weight_tile + n][lane];
#pragma unroll
    for (int m = 0; m < kWarpTiles / 2; ++m) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint4 upper = stage.rows[row_tile + 2 * m][part][lane];
        const uint4 lower = stage.rows[row_tile + 2 * m + 1][part][lane];
        const uint32_t first[4] = {upper.x, lower.x, upper.y, lower.y};
        const uint32_t second[4] = {upper.z, lower.z, upper.w, lower.w};
        // Not one after the other into the same sums: each would wait for the one before.
#pragma unroll
        for (int n = 0; n < kWarpTiles; ++n) F16::mma(d[m][n], first, b[n].x, b[n].y);
#pragma unroll
        for (int n = 0; n < kWarpTiles; ++n) F16::mma(d[m][n], second, b[n].z, b[n].w);
      }
    }
  }
  const float* bias = call.bias + int64_t{head} * call.bias_count;
#pragma unroll
  for (int m = 0; m < kWarpTiles / 2; ++m) {
#pragma unroll
    for (int n = 0; n < kWarpTiles; ++n) {
      const int64_t row = (first_row + row_tile + 2 * m) * kWeightRows + lane / 4;
      const int column = (first_weight + weight_tile + n) * kWeightRows + 2 * (lane % 4);
      out.store(head, row, column, bias, d[m][n][0], d[m][n][1]);
      out.store(head, row + kWeightRows, column, bias, d[m][n][2], d[m][n][3]);
    }
  }
}

constexpr int kFewTiles = 4;  // rows of tiles of a few queries
constexpr int kFewWarps = 8;

// The same for a few rows, which wait for weights: a block has 8 columns of the result, and its
// warps share the columns of tiles between them. The upper half of an mma has rows, the lower half
// what rounding took away from them.
template <class Out>
__global__ void __launch_bounds__(32 * kFewWarps)
    few_rows_kernel(const __grid_constant__ Product call, const __grid_constant__ Out out,
                    int row_tiles) {
  constexpr int kOnce = 4;  // tiles of weights of a warp that are under way
  __shared__ float2 sums[kFewWarps][kFewTiles][32];
  const int head = static_cast<int>(blockIdx.y), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int columns = call.rows.columns, tile = static_cast<int>(blockIdx.x);
  const uint4* rows = call.rows.words + head * call.rows.stride + lane;
  const uint4* weights = call.weights + head * call.weight_stride + lane +
                         int64_t{min(tile, call.weight_tiles - 1)} * columns * 32;
  uint4 b[kOnce];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kOnce; ++i) {
      b[i] = load_stream(weights + min(first + i * kFewWarps, columns - 1) * 32);
    }
  };
  load(warp);
  begin_dependent();
  float d[kFewTiles][4] = {};
#pragma unroll 1
  for (int first = warp; first < columns; first += kOnce * kFewWarps) {
#pragma unroll
    for (int i = 0; i < kOnce; ++i) {
      const int column = first + i * kFewWarps;
      if (column >= columns) break;
#pragma unroll
      for (int t = 0; t < kFewTiles; ++t) {
        if (t >= row_tiles) break;
        const uint4 high = rows[(t * columns + column) * 64];
        const uint4 low = rows[(t * columns + column) * 64 + 32];
        const uint32_t upper[4] = {high.x, low.x, high.y, low.y};
        const uint32_t lower[4] = {high.z, low.z, high.w, low.w};
        F16::mma(d[t], upper, b[i].x, b[i].y);
        F16::mma(d[t], lower, b[i].z, b[i].w);
      }
    }
    if (first + kOnce * kFewWarps < columns) load(first + kOnce * kFewWarps);
  }
#pragma unroll
  for (int t = 0; t < kFewTiles; ++t) {
    sums[warp][t][lane] = make_float2(d[t][0] + d[t][2], d[t][1] + d[t][3]);
  }
  __syncthreads();
  if (warp >= row_tiles) return;
  float2 sum = {0, 0};
#pragma unroll
  for (int w = 0; w < kFewWarps; ++w) {
    sum.x += sums[w][warp][lane].x;
    sum.y += sums[w][warp][lane].y;
  }
  out.store(head, warp * kWeightRows + lane / 4, tile * kWeightRows + 2 * (lane % 4),
            call.bias + int64_t{head} * call.bias_count, sum.x, sum.y);
}

// `wanted`: columns of the result, to the end of what is stored.
template <class Out>
Status launch(const Product& product, const Out& out, int64_t rows, int64_t wanted, int heads,
              const Device& device, cudaStream_t stream) {
  const auto few = static_cast<int>((rows + kWeightRows - 1) / kWeightRows);
  if (few <= kFewTiles) {
    const dim3 grid(static_cast<unsigned>((wanted + kWeightRows - 1) / kWeightRows),
                    static_cast<unsigned>(heads));
    return launch_blocks(few_rows_kernel<Out>, grid, 32 * kFewWarps, 0, device, stream, product,
                         out, few);
  }
  constexpr int kBytes = kRing * sizeof(Stage);
  static_assert(kBytes <= kLeastBlockShared);
  const dim3 grid(static_cast<unsigned>((rows + kProductTile - 1) / kProductTile),
                  static_cast<unsigned>((wanted + kProductTile - 1) / kProductTile),
                  static_cast<unsigned>(heads));
  return launch_blocks(product_kernel<Out>, grid, kThreads, kBytes, device, stream, product, out);
}

Product product_of(const SplitMatrix& rows, const void* weights, int64_t count, int64_t columns,
                   const float* bias) {
  Product product;
  product.rows = rows;
  product.weights = static_cast<const uint4*>(weights);
  product.weight_stride = weight_bytes(count, columns) / static_cast<int64_t>(sizeof(uint4));
  product.weight_tiles = static_cast<int32_t>(weight_rows(count));
  product.bias = bias;
  product.bias_count = static_cast<int32_t>(count);
  return product;
}

}  // namespace

Status find_units(const BlockClassify& call, const Stretch& stretch, cudaStream_t stream) {
  const PrefillShape& p = call.lookup.shape;
  const ClassifierNetwork& network = call.network;
  const Product product =
      product_of(call.queries, network.hidden_weight, network.hidden, p.dim, network.hidden_bias);
  return launch(product, UnitsOut{call.units, network.hidden}, stretch.rows(call),
                int64_t{call.units.columns} * kWeightColumns, p.kv_heads, call.device, stream);
}

Status find_logits(const BlockClassify& call, const Stretch& stretch, cudaStream_t stream) {
  const PrefillShape& p = call.lookup.shape;
  const int32_t buckets = call.lookup.level.clusters;
  const Product product = product_of(call.units, call.network.output_weight, buckets,
                                     call.network.hidden, call.network.output_bias);
  LogitsOut out;
  out.to = call.logits;
  out.width = product.weight_tiles * kWeightRows;
  out.stride = classify_rows(call.tokens, p.group) * out.width;
  out.buckets = buckets;
  return launch(product, out, stretch.rows(call), out.width, p.kv_heads, call.device, stream);
}

}  // namespace sqz::cuda
