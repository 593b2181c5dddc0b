// Tiles of rows in shared memory and their products by mma.sync: 16 rows a warp that stay, against
// rows that stream past. Rows are padded by 16 bytes, so that ldmatrix meets no bank twice.
#pragma once

#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/prefill_common/rows.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"
#include "libruntime/kernels/cuda/ptx/ldmatrix.cuh"

namespace sqz::cuda {

template <int kDim>
struct Sm80Tile {
  static constexpr int kWarps = kDim == 256 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;              // that stay
  static constexpr int kStream = kDim == 256 ? 32 : 64;  // that stream past, at once
  static constexpr int kStride = kDim + 8;               // elements of a row
  static constexpr int kChunks = kDim / 8;               // of 16 bytes
};

// Query rows to shared memory: at(row) is the element at which a row begins, or below 0 for zeros.
// Queries of another type than `dtype` come in two parts, `high` and what that rounded away.
template <class Element, int kDim, int kRows, class At>
__device__ __forceinline__ void load_query_rows(const void* queries, DType q_dtype, DType dtype,
                                                const At& at, uint16_t* high, uint16_t* low) {
  using Tile = Sm80Tile<kDim>;
#pragma unroll 1
  for (int item = threadIdx.x; item < kRows * Tile::kChunks; item += Tile::kThreads) {
    const int row = item / Tile::kChunks, chunk = item % Tile::kChunks;
    const int64_t from = at(row);
    const int to = row * Tile::kStride + chunk * 8;
    uint32_t upper[4] = {}, lower[4] = {};
    if (q_dtype == dtype) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (from >= 0) {
        words = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(queries) + from +
                                                chunk * 8);
      }
      *reinterpret_cast<uint4*>(high + to) = words;
      continue;
    }
    if (from >= 0) {
      float x[8];
      load_8(q_dtype, queries, from + chunk * 8, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) split<Element>(x[2 * i], x[2 * i + 1], upper[i], lower[i]);
    }
    *reinterpret_cast<uint4*>(high + to) = make_uint4(upper[0], upper[1], upper[2], upper[3]);
    *reinterpret_cast<uint4*>(low + to) = make_uint4(lower[0], lower[1], lower[2], lower[3]);
  }
}

// Starts the way of kRows rows to shared memory; at(row): where they are.
template <int kDim, int kRows, class At>
__device__ __forceinline__ void fetch_rows(const At& at, uint16_t* to) {
  using Tile = Sm80Tile<kDim>;
#pragma unroll 1
  for (int item = threadIdx.x; item < kRows * Tile::kChunks; item += Tile::kThreads) {
    const int row = item / Tile::kChunks, chunk = item % Tile::kChunks;
    ptx::cp_async_16(ptx::shared_address(to + row * Tile::kStride + chunk * 8),
                     static_cast<const char*>(at(row)) + chunk * 16, 16);
  }
}

// d += the warp's 16 rows times 8 kTiles streamed rows. Lane 4 g + t: rows g (d[.][0, 1]) and g + 8
// (d[.][2, 3]) against streamed rows 8 tile + 2 t and the next.
template <class Element, int kDim, int kTiles>
__device__ __forceinline__ void add_product(const uint16_t* rows, const uint16_t* streamed,
                                            float (&d)[kTiles][4]) {
  constexpr int kStride = Sm80Tile<kDim>::kStride;
  const int lane = threadIdx.x % 32;
  const uint32_t a_at = ptx::shared_address(rows + lane % 16 * kStride + lane / 16 * 8);
  const uint32_t b_at =
      ptx::shared_address(streamed + (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    ptx::ldmatrix_x4(a, a_at + k * 32);
#pragma unroll
    for (int t = 0; t < kTiles / 2; ++t) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, b_at + (16 * t * kStride + k * 16) * 2);
      Element::mma(d[2 * t], a, b[0], b[1]);
      Element::mma(d[2 * t + 1], a, b[2], b[3]);
    }
  }
}

// Adds 2^x of a lane's values in its first row, or (half = 1) its second, to sum 2^maximum.
template <int kTiles>
__device__ __forceinline__ void add_exponentials(const float (&x)[kTiles][4], int half,
                                                 float& maximum, float& sum) {
  float top = maximum;
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const float value = x[i / 2][2 * half + i % 2];
    if (!(value <= top)) top = value;  // NaN, too
  }
  sum *= ptx::ex2_approx(maximum - top);
  maximum = top;
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) sum += ptx::ex2_approx(x[i / 2][2 * half + i % 2] - top);
}

}  // namespace sqz::cuda
