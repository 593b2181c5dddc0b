// Causal attention of a dense pass, see causal.h. Lanes run along the keys, then along the values'
// dimensions. Every sum is one chain of multiply-adds in the order of the keys or dimensions.
#if defined(SQZ_CPU_CAUSAL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SQZ_CPU_CAUSAL_INL_H_
#undef SQZ_CPU_CAUSAL_INL_H_
#else
#define SQZ_CPU_CAUSAL_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "libruntime/kernels/cpu/causal.h"
#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/kernels/cpu/load-inl.h"
#include "libruntime/kernels/cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sqz {
namespace HWY_NAMESPACE {

// 2^x for x <= 0: split at the nearest integer, Taylor series of the rest (error < 2e-7).
HWY_INLINE VF exp2_of(VF x) {
  const F f;
  const hn::RebindToSigned<F> integers;
  const VF least = hn::Set(f, -126.0f);
  const VF round = hn::Set(f, 12582912.0f);        // 1.5 * 2^23: adding it rounds to an integer
  x = hn::IfThenElse(hn::Lt(x, least), least, x);  // written so that a NaN stays one
  const VF shifted = hn::Add(x, round);
  const VF rest = hn::Sub(x, hn::Sub(shifted, round));
  VF p = hn::MulAdd(rest, hn::Set(f, 1.5403530e-4f), hn::Set(f, 1.3333558e-3f));
  p = hn::MulAdd(p, rest, hn::Set(f, 9.6181291e-3f));
  p = hn::MulAdd(p, rest, hn::Set(f, 5.5504109e-2f));
  p = hn::MulAdd(p, rest, hn::Set(f, 2.4022651e-1f));
  p = hn::MulAdd(p, rest, hn::Set(f, 6.9314718e-1f));
  p = hn::MulAdd(p, rest, hn::Set(f, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(integers, shifted));
  return hn::BitCast(f, hn::Add(hn::BitCast(integers, p), exponent));
}

// Turns scores s[kCausalBlock] of one row into weights against the running maximum and adds up
// their sum; out[dim] is rescaled if the maximum grew. Keys outside [low, high) weigh nothing.
HWY_INLINE void causal_weights(float* s, int64_t keys, int64_t low, int64_t high, float* maximum,
                               float* sum, float* out, int64_t dim) {
  const F f;
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < low; ++i) s[i] = kMinusInfinity;
  for (int64_t i = high; i < keys; ++i) s[i] = kMinusInfinity;
  const float old = *maximum;
  VF top = hn::Set(f, old);
  for (int64_t i = 0; i < keys; i += kLanes) top = hn::Max(hn::LoadU(f, s + i), top);
  const float peak = hn::GetLane(hn::MaxOfLanes(f, top));
  if (peak > old && old != kMinusInfinity) {
    const VF factor = exp2_of(hn::Set(f, old - peak));
    *sum *= hn::GetLane(factor);
    for (int64_t i = 0; i < dim; i += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(f, out + i), factor), f, out + i);
    }
  }
  *maximum = peak;
  const VF peaks = hn::Set(f, peak);
  VF total = hn::Zero(f);
  for (int64_t i = 0; i < keys; i += kLanes) {
    const VF p = exp2_of(hn::Sub(hn::LoadU(f, s + i), peaks));
    total = hn::Add(total, p);
    hn::StoreU(p, f, s + i);
  }
  HWY_ALIGN float lanes[kLanes];
  hn::Store(total, f, lanes);
  for (const float lane : lanes) *sum += lane;
}

template <int kRows>
void attend_causal_tiled(const CausalTask& t) {
  static_assert(kCausalPanel % (2 * kLanes) == 0 && kCausalBlock % kCausalPanel == 0);
  const int64_t dim = t.dim, width = padded_dim(dim);
  const int64_t groups = (t.rows + kRows - 1) / kRows, padded_rows = groups * kRows;
  float* q = t.workspace;                       // [groups, d, kRows]
  float* s = q + padded_rows * dim;             // [padded_rows, kCausalBlock]
  float* out = s + padded_rows * kCausalBlock;  // [padded_rows, width]
  float* maximum = out + padded_rows * width;   // [padded_rows]
  float* sum = maximum + padded_rows;           // [padded_rows]

  const float to_log2 = t.scale * 1.44269504f;  // the softmax below is in powers of two
  for (int64_t r = 0; r < padded_rows; ++r) {
    float* packed = q + r / kRows * dim * kRows + r % kRows;
    for (int64_t j = 0; j < dim; ++j) {
      packed[j * kRows] = r < t.rows ? t.q[r * dim + j] * to_log2 : 0.0f;
    }
  }
  std::fill_n(maximum, padded_rows, -std::numeric_limits<float>::infinity());
  std::fill_n(sum, padded_rows, 0.0f);
  std::fill_n(out, padded_rows * width, 0.0f);

  const int64_t first = *std::min_element(t.begin, t.begin + t.rows);
  const int64_t last = *std::max_element(t.end, t.end + t.rows);
  for (int64_t block = first / kCausalPanel * kCausalPanel; block < last; block += kCausalBlock) {
    const int64_t seen = std::min(last - block, kCausalBlock);
    const int64_t keys = round_up(seen, kCausalPanel);
    for (int64_t panel = 0; panel < keys; panel += kCausalPanel) {
      const float* b = t.panels + (block + panel) * dim;
      for (int64_t g = 0; g < groups; ++g) {
        // Compile-time strides keep all rows on one address register.
        const float* a = q + g * dim * kRows;
        const auto queries = [a](int i, int64_t k) { return a[i + k * kRows]; };
        for (int64_t c = 0; c < kCausalPanel; c += 2 * kLanes) {
          multiply_block<kRows, 2>(queries, b + c, kCausalPanel, dim,
                                   s + g * kRows * kCausalBlock + panel + c, kCausalBlock, false);
        }
      }
    }
    for (int64_t r = 0; r < t.rows; ++r) {
      float* row = s + r * kCausalBlock;
      const int64_t low = std::max<int64_t>(t.begin[r] - block, 0);
      const int64_t high = std::min(t.end[r] - block, seen);
      if (low < high) {
        causal_weights(row, keys, low, high, maximum + r, sum + r, out + r * width, width);
      } else {
        std::fill_n(row, keys, 0.0f);
      }
    }
    for (int64_t c = 0; c < width; c += 2 * kLanes) {
      for (int64_t g = 0; g < groups; ++g) {
        const float* a = s + g * kRows * kCausalBlock;
        const auto weights = [a](int i, int64_t k) { return a[i * kCausalBlock + k]; };
        multiply_block<kRows, 2>(weights, t.values + block * width + c, width, seen,
                                 out + g * kRows * width + c, width, true);
      }
    }
  }
  for (int64_t r = 0; r < t.rows; ++r) {
    const float inverse = 1.0f / sum[r];
    for (int64_t j = 0; j < dim; ++j) t.out[r * dim + j] = out[r * width + j] * inverse;
    t.lse[r] = (maximum[r] + std::log2(sum[r])) * 0.69314718f;
  }
}

void attend_causal(const CausalTask& task) {
  // A tile made for a prompt's many rows would waste most of its work on one generated token.
  if (task.rows <= 2) return attend_causal_tiled<2>(task);
  if (task.rows <= 4) return attend_causal_tiled<4>(task);
  attend_causal_tiled<(kLanes >= 16 ? 12 : 6)>(task);  // of 32 registers, or of 16
}

}  // namespace HWY_NAMESPACE
}  // namespace sqz
HWY_AFTER_NAMESPACE();
#endif
