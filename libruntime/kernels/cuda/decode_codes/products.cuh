// Products of queries with rows of codes on the tensor cores, in whole numbers and so exact but for
// the queries, which have two numbers of 8 bits each: 15 bits below the greatest of a row. Rows are
// the N side of the mma, straight from memory into registers; which dimension is where follows from
// how they are loaded, alike for both sides.
#pragma once

#include "libruntime/kernels/cuda/decode_codes/shared.cuh"
#include "libruntime/kernels/cuda/ptx/mma_s8.cuh"

namespace sqz::cuda {

// The dimension of byte `m` of register `i` of lane group `t`, in rows of 8 bits.
template <int kDim>
struct Rows8 {
  static constexpr int kSteps = kDim / 32;
  __device__ static int dim_of(int t, int i, int m) {
    constexpr int kWhole = kDim / 64 * 4;  // registers that 16-byte loads fill
    return i < kWhole ? 64 * (i / 4) + 16 * t + 4 * (i % 4) + m
                      : kDim / 64 * 64 + 8 * t + 4 * (i - kWhole) + m;
  }

  uint32_t words[kDim / 16];

  __device__ __forceinline__ void load(const char* row, int lane) {
#pragma unroll
    for (int c = 0; c < kDim / 64; ++c) {
      const uint4 part = load_stream(row + 64 * c + 16 * (lane % 4));
      words[4 * c] = part.x;
      words[4 * c + 1] = part.y;
      words[4 * c + 2] = part.z;
      words[4 * c + 3] = part.w;
    }
    if constexpr (kDim % 64 != 0) {
      const uint2 part =
          __ldg(reinterpret_cast<const uint2*>(row + kDim / 64 * 64 + 8 * (lane % 4)));
      words[kDim / 16 - 2] = part.x;
      words[kDim / 16 - 1] = part.y;
    }
  }
  __device__ __forceinline__ uint32_t fragment(int i) const {
    return words[i];
  }
};

// Rows of 1 or 2 bits. A lane has bytes [t P, t P + P) of a row of 4 P; nibbles of its words pick
// the numbers, two of a byte for each of 4 / kBits shifts.
template <int kDim, int kBits>
struct KeyCodes {
  static constexpr int kRowBytes = kDim * kBits / 8, kPart = kRowBytes / 4;
  static constexpr int kWords = (kPart + 3) / 4;
  static constexpr int kShifts = 4 / kBits;        // 2, or 4
  static constexpr int kSteps = kWords * kShifts;  // of 32 dimensions
  static_assert(kSteps <= kCodeSteps<kDim>);

  // kDim or more: none.
  __device__ static int dim_of(int t, int i, int m) {
    const int word = i / (2 * kShifts), half = i / kShifts % 2, shift = i % kShifts;
    const int byte = 4 * word + 2 * half + m / 2, plane = shift + kShifts * (m % 2);
    return byte < kPart ? t * kPart + byte + kRowBytes * plane : kDim;
  }

  uint32_t words[kWords];

  __device__ __forceinline__ void load(const char* row, int lane) {
    const char* from = row + lane % 4 * kPart;
    if constexpr (kPart == 16) {
      const uint4 part = load_stream(from);
      words[0] = part.x;
      words[1] = part.y;
      words[2] = part.z;
      words[3] = part.w;
    } else if constexpr (kPart == 8) {
      const uint2 part = __ldg(reinterpret_cast<const uint2*>(from));
      words[0] = part.x;
      words[1] = part.y;
    } else if constexpr (kPart == 4) {
      words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
    } else {
      constexpr int kUnit = kPart % 2 == 0 ? 2 : 1;
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = 0;
#pragma unroll
      for (int b = 0; b < kPart; b += kUnit) {
        const uint32_t unit = kUnit == 2 ? __ldg(reinterpret_cast<const uint16_t*>(from + b))
                                         : __ldg(reinterpret_cast<const uint8_t*>(from + b));
        words[b / 4] |= unit << 8 * (b % 4);
      }
    }
  }
  __device__ __forceinline__ uint32_t fragment(int i) const {
    constexpr uint32_t kMask = kBits == 2 ? 0x33333333u : 0x11111111u;
    // -127, -38, 38, 127; or -127, 127.
    constexpr uint32_t kNumbers = kBits == 2 ? 0x7F26DA81u : 0x7F817F81u;
    const uint32_t word = words[i / (2 * kShifts)] >> (i % kShifts * kBits);
    return __byte_perm(kNumbers, 0, (word & kMask) >> (i / kShifts % 2 * 16));
  }
};

// Query rows [kMostGroup][kDim] in two parts each, as the A side of products with Rows. All threads
// of the block, between barriers.
template <class Rows, int kDim, int kSteps>
__device__ void make_query_parts(QueryParts<kSteps>& to, const float (&rows)[kMostGroup][kDim]) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  if (warp < kMostGroup) {
    float most = 0;
    for (int c = lane; c < kDim; c += 32) most = fmaxf(most, fabsf(rows[warp][c]));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (lane == 0) to.step[warp] = most / 127.0f;
  }
  __syncthreads();
#pragma unroll 1
  for (int item = thread; item < Rows::kSteps * 32; item += kCodedThreads) {
    const int row = item % 32 / 4, t = item % 4, step = item / 32;
    const float size = to.step[row], inverse = size > 0 ? 1.0f / size : 0.0f;
    uint32_t words[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int dim = Rows::dim_of(t, 2 * step + half, m);
        const float x = dim < kDim ? rows[row][dim] * inverse : 0.0f;
        const float first = fminf(fmaxf(rintf(x), -127.0f), 127.0f);
        const float second = fminf(fmaxf(rintf((x - first) * 254.0f), -127.0f), 127.0f);
        words[2 * half] |= (static_cast<uint32_t>(static_cast<int>(first)) & 255u) << 8 * m;
        words[2 * half + 1] |= (static_cast<uint32_t>(static_cast<int>(second)) & 255u) << 8 * m;
      }
    }
    to.words[item] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  __syncthreads();
}

// out[t][i]: query row lane / 4 against row 8 t + 2 (lane % 4) + i, not yet times that row's scale.
template <class Rows, int kSteps, int kTiles>
__device__ __forceinline__ void multiply_parts(const QueryParts<kSteps>& queries,
                                               const Rows (&rows)[kTiles], int lane,
                                               float (&out)[kTiles][2]) {
  int32_t d[kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < Rows::kSteps; ++step) {
    const uint4 a = queries.words[step * 32 + lane];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      ptx::mma_m16n8k32_s8(d[t], a, rows[t].fragment(2 * step), rows[t].fragment(2 * step + 1));
    }
  }
  const float first = queries.step[lane / 4], second = first / 254.0f;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out[t][i] = static_cast<float>(d[t][i]) * first + static_cast<float>(d[t][i + 2]) * second;
    }
  }
}

}  // namespace sqz::cuda
