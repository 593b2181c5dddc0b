// A block has 64 rows. Levels are exact in f16; the rotation is the sum of two numbers in f16, so
// that products have 21 bits. Of 8 warps four take 16 rows each for the lower half of the
// dimensions, four for the upper half.
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/upload/requantise_rows/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256, kRows = 64;

__device__ float level_of(uint32_t code) {
  // Levels of 4 bits are those of the other sign backwards.
  const uint32_t i = code < 8 ? 7 - code : code - 8;
  const uint32_t four = i < 4 ? 0x2C1F1206 : 0x7F604B3A;  // 6 18 31 44, 58 75 96 127
  const auto level = static_cast<float>(four >> (8 * (i % 4)) & 0xFF);
  return code < 8 ? -level : level;
}

template <int kDim>
struct Shared {
  union {
    uint32_t levels[kRows][kDim / 2 + 4];  // pairs; fragments of a warp lie in different banks
    alignas(16) int8_t out[kRows * kDim];
  };
  float largest[2][kRows];  // of half a row each
  float old_scale[kRows], scale[kRows];
};

template <class Element, int kDim>
class Requantise {
 public:
  __device__ Requantise(const RequantiseRows& params, Shared<kDim>& shared)
      : p_(params),
        s_(shared),
        first_(int64_t{blockIdx.x} * kRows),
        rows_(static_cast<int>(min(params.rows - first_, int64_t{kRows}))) {}

  __device__ void run() {
    load();
    __syncthreads();
    turn_back();
    __syncthreads();
    if (thread_ < kRows) scale_row(thread_);
    __syncthreads();
    round();
    __syncthreads();
    constexpr int kWords = kDim / 16;
    auto* to = static_cast<uint4*>(p_.out) + first_ * kWords;
    const auto* from = reinterpret_cast<const uint4*>(s_.out);
    for (int i = thread_; i < rows_ * kWords; i += kThreads) to[i] = from[i];
  }

 private:
  static constexpr int kTiles = kDim / 16;  // of 8 dimensions, of half a row

  // Beyond the last row zeros' levels, which nobody reads.
  __device__ void load() {
    constexpr int kWords = kDim / 8, kHalf = kDim / 4;  // of a row of codes; pairs of half a row
    const auto* from = static_cast<const uint32_t*>(p_.codes) + first_ * kWords;
#pragma unroll 2
    for (int i = thread_; i < kRows * kWords; i += kThreads) {
      const int row = i / kWords, pair = i % kWords * 2;
      const uint32_t codes = row < rows_ ? from[i] : 0;
      const auto levels = [&](int bit) {  // of two neighbouring bytes
        return F16::pack(level_of(codes >> bit & 15), level_of(codes >> (bit + 8) & 15));
      };
      s_.levels[row][pair] = levels(0);
      s_.levels[row][pair + 1] = levels(16);
      s_.levels[row][kHalf + pair] = levels(4);
      s_.levels[row][kHalf + pair + 1] = levels(20);
    }
  }

  // sums_: numbers of the residual, not yet times the scale, as mma has them; largest.
  __device__ void turn_back() {
    const uint32_t* const upper = &s_.levels[tile_ + lane_ / 4][lane_ % 4];
    const uint32_t* const lower = &s_.levels[tile_ + lane_ / 4 + 8][lane_ % 4];
    const float* const turn = p_.rotation + (half_ + lane_ / 4) * kDim + 2 * (lane_ % 4);
#pragma unroll 1
    for (int step = 0; step < kDim / 16; ++step) {
      const uint32_t a[4] = {upper[8 * step], lower[8 * step], upper[8 * step + 4],
                             lower[8 * step + 4]};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float* const at = turn + 8 * n * kDim + 16 * step;
        const float2 x = __ldg(reinterpret_cast<const float2*>(at));
        const float2 y = __ldg(reinterpret_cast<const float2*>(at + 8));
        uint32_t high[2], low[2];
        split<F16>(x.x, x.y, high[0], low[0]);
        split<F16>(y.x, y.y, high[1], low[1]);
        F16::mma(sums_[n], a, high[0], high[1]);
        F16::mma(sums_[n], a, low[0], low[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = 0;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        most = fmaxf(most, fmaxf(fabsf(sums_[n][2 * i]), fabsf(sums_[n][2 * i + 1])));
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if (lane_ % 4 == 0) s_.largest[half_ > 0 ? 1 : 0][tile_ + lane_ / 4 + 8 * i] = most;
    }
  }

  __device__ void scale_row(int row) {
    const bool is = row < rows_;
    const float old =
        is ? Element::low(static_cast<const uint16_t*>(p_.scales)[first_ + row]) : 0.0f;
    const float most = old * fmaxf(s_.largest[0][row], s_.largest[1][row]);
    const auto stored = static_cast<uint16_t>(Element::pack(most / 127.0f, 0.0f));
    if (is) static_cast<uint16_t*>(p_.out_scales)[first_ + row] = stored;
    s_.old_scale[row] = old;
    s_.scale[row] = Element::low(stored);
  }

  __device__ void round() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile_ + lane_ / 4 + 8 * i;
      const float old = s_.old_scale[row], scale = s_.scale[row];
      const auto code = [&](float sum) {
        const float x = scale > 0 ? rintf(old * sum / scale) : 0.0f;
        return static_cast<uint32_t>(static_cast<int>(fminf(fmaxf(x, -127.0f), 127.0f))) & 0xFF;
      };
      auto* to = reinterpret_cast<uint16_t*>(s_.out + row * kDim + half_ + 2 * (lane_ % 4));
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        to[4 * n] = static_cast<uint16_t>(code(sums_[n][2 * i]) | code(sums_[n][2 * i + 1]) << 8);
      }
    }
  }

  const RequantiseRows& p_;
  Shared<kDim>& s_;
  const int64_t first_;
  const int rows_;
  const int thread_ = static_cast<int>(threadIdx.x), lane_ = thread_ % 32;
  const int tile_ = thread_ / 32 % 4 * 16;       // first row of the warp
  const int half_ = thread_ / 128 * (kDim / 2);  // first dimension
  float sums_[kTiles][4] = {};
};

template <class Element, int kDim>
__global__ void __launch_bounds__(kThreads)
    requantise_kernel(const __grid_constant__ RequantiseRows params) {
  __shared__ Shared<kDim> shared;
  Requantise<Element, kDim>(params, shared).run();
}

}  // namespace

Status requantise_rows(const RequantiseRows& call, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((call.rows + kRows - 1) / kRows);
  return for_dim(call.dim, no_such_dim(call.dim), [&](auto dim) {
    const auto kernel = call.dtype == DType::kBF16 ? requantise_kernel<Bf16, dim.value>
                                                   : requantise_kernel<F16, dim.value>;
    return launch_blocks(kernel, blocks, kThreads, 0, Device(), stream, call);
  });
}

}  // namespace sqz::cuda
