// Tiles of rows in shared memory and their products by mma.sync: 16 or 32 rows a warp that stay,
// against rows that stream past. A row that streams past is read from shared memory once a warp, so
// 32 rows halve what is read. Rows are padded by 16 bytes, so that ldmatrix meets no bank twice.
#pragma once

#include <type_traits>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"
#include "libruntime/kernels/cuda/ptx/ldmatrix.cuh"

namespace sqz::cuda {

// kTiles: of 16 rows, a warp. kParts: warps that have the same rows, and a part of their results
// each.
template <int kDim, int kTiles = 1, int kParts = 1>
struct Sm80Tile {
  static constexpr int kRowWarps = kDim >= 256 ? 2 : 4;  // with rows of their own
  static constexpr int kThreads = 32 * kRowWarps * kParts;
  static constexpr int kBlocks = kTiles > 1 ? 2 : 1;  // a multiprocessor, at least
  static constexpr int kWarpRows = 16 * kTiles;
  static constexpr int kRows = kWarpRows * kRowWarps;  // that stay
  // That stream past, at once.
  static constexpr int kStream = kDim > 256 ? 16 : kDim > 160 ? 32 : 64;
  static constexpr int kStride = kDim + 8;  // elements of a row
  static constexpr int kChunks = kDim / 8;  // of 16 bytes
};

// Bytes of so many rows in shared memory.
template <int kDim>
constexpr int64_t sm80_bytes(int rows) {
  return int64_t{rows} * Sm80Tile<kDim>::kStride * 2;
}

// Calls launch() with the 16-row tiles of a warp: two where there are rows enough, unless registers
// are too few or queries are `wide`, in two parts each of which stays in shared memory.
template <int kDim, class Launch>
Status with_tiles(bool wide, int rows, const Launch& launch) {
  if constexpr (kDim <= 128) {
    if (!wide && rows > Sm80Tile<kDim>::kRows) return launch(std::integral_constant<int, 2>());
  }
  return launch(std::integral_constant<int, 1>());
}

// Rows of float32 to shared memory in two parts, `high` and what that rounded away; value(row,
// chunk, out): numbers 8 chunk and so on of a row, or nothing for zeros.
template <class Element, int kDim, int kRows, int kThreads, class Value>
__device__ __forceinline__ void split_rows(const Value& value, uint16_t* high, uint16_t* low) {
  using Tile = Sm80Tile<kDim>;
#pragma unroll 1
  for (int item = threadIdx.x; item < kRows * Tile::kChunks; item += kThreads) {
    const int row = item / Tile::kChunks, chunk = item % Tile::kChunks;
    float x[8] = {};
    value(row, chunk, x);
    uint32_t upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) split<Element>(x[2 * i], x[2 * i + 1], upper[i], lower[i]);
    const int to = row * Tile::kStride + chunk * 8;
    *reinterpret_cast<uint4*>(high + to) = make_uint4(upper[0], upper[1], upper[2], upper[3]);
    *reinterpret_cast<uint4*>(low + to) = make_uint4(lower[0], lower[1], lower[2], lower[3]);
  }
}

// Query rows to shared memory: at(row) is the element at which a row begins, or below 0 for zeros.
// Queries of `dtype` are under way afterwards, by cp.async. Others come in two parts.
template <class Element, int kDim, int kRows, int kThreads, class At>
__device__ __forceinline__ void load_query_rows(const void* queries, DType q_dtype, DType dtype,
                                                const At& at, uint16_t* high, uint16_t* low) {
  using Tile = Sm80Tile<kDim>;
  if (q_dtype != dtype) {
    const auto value = [&](int row, int chunk, float(&x)[8]) {
      if (const int64_t from = at(row); from >= 0) load_8(q_dtype, queries, from + chunk * 8, x);
    };
    return split_rows<Element, kDim, kRows, kThreads>(value, high, low);
  }
  for (int item = threadIdx.x; item < kRows * Tile::kChunks; item += kThreads) {
    const int row = item / Tile::kChunks, chunk = item % Tile::kChunks;
    const int64_t from = at(row);
    const auto* source = static_cast<const uint16_t*>(queries) + max(from, int64_t{0});
    ptx::cp_async_16(ptx::shared_address(high + row * Tile::kStride + chunk * 8),
                     source + chunk * 8, from >= 0 ? 16 : 0);
  }
}

// Starts the way of kRows rows to shared memory; at(row): where they are.
template <int kDim, int kRows, int kThreads, class At>
__device__ __forceinline__ void fetch_rows(const At& at, uint16_t* to) {
  using Tile = Sm80Tile<kDim>;
  static_assert(kRows * Tile::kChunks % kThreads == 0);
#pragma unroll
  for (int i = 0; i < kRows * Tile::kChunks / kThreads; ++i) {
    const int item = static_cast<int>(threadIdx.x) + i * kThreads;
    const int row = item / Tile::kChunks, chunk = item % Tile::kChunks;
    ptx::cp_async_16(ptx::shared_address(to + row * Tile::kStride + chunk * 8),
                     static_cast<const char*>(at(row)) + chunk * 16, 16);
  }
}

// d += the warp's rows, 16 kTiles of them, times 8 kStreamed rows that stream past. Lane 4 g + t:
// rows g (d[.][.][0, 1]) and g + 8 (d[.][.][2, 3]) of a tile against rows 8 tile + 2 t and the
// next.
template <class Element, int kDim, int kTiles, int kStreamed>
__device__ __forceinline__ void add_product(const uint16_t* rows, const uint16_t* streamed,
                                            float (&d)[kTiles][kStreamed][4]) {
  constexpr int kStride = Sm80Tile<kDim>::kStride;
  const int lane = threadIdx.x % 32;
  const uint32_t a_at = ptx::shared_address(rows + lane % 16 * kStride + lane / 16 * 8);
  const uint32_t b_at =
      ptx::shared_address(streamed + (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) ptx::ldmatrix_x4(a[m], a_at + (16 * m * kStride + k * 16) * 2);
#pragma unroll
    for (int t = 0; t < kStreamed / 2; ++t) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, b_at + (16 * t * kStride + k * 16) * 2);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        Element::mma(d[m][2 * t], a[m], b[0], b[1]);
        Element::mma(d[m][2 * t + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Adds 2^x of a lane's values in its rows to sum 2^maximum. What is NaN or +infinity makes the sum
// NaN.
template <int kTiles, int kStreamed>
__device__ __forceinline__ void add_exponentials(const float (&x)[kTiles][kStreamed][4],
                                                 float (&maximum)[2 * kTiles],
                                                 float (&sum)[2 * kTiles]) {
#pragma unroll
  for (int m = 0; m < 2 * kTiles; ++m) {
    float top = maximum[m];
#pragma unroll
    for (int i = 0; i < 2 * kStreamed; ++i) {
      top = fmaxf(top, x[m / 2][i / 2][m % 2 * 2 + i % 2]);
    }
    sum[m] *= ptx::ex2_approx(maximum[m] - top);
    maximum[m] = top;
#pragma unroll
    for (int i = 0; i < 2 * kStreamed; ++i) {
      sum[m] += ptx::ex2_approx(x[m / 2][i / 2][m % 2 * 2 + i % 2] - top);
    }
  }
}

}  // namespace sqz::cuda
