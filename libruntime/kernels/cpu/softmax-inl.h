// Exponentials: the online softmax in both layouts, and the sums behind cluster scores.
#if defined(SQZ_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SQZ_CPU_SOFTMAX_INL_H_
#undef SQZ_CPU_SOFTMAX_INL_H_
#else
#define SQZ_CPU_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "hwy/contrib/math/math-inl.h"
#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/kernels/cpu/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sqz {
namespace HWY_NAMESPACE {

// Running maxima start at kLowest, never -infinity: -infinity minus itself would be NaN. A NaN
// among the x stays visible in the sum, because x - maximum is NaN whatever the maximum.
HWY_INLINE VF exp_of(VF x) {
  const F f;
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(f, x));
}

// sum, or NaN in lanes where x has been -infinity.
HWY_INLINE VF unless_overflown(VF low, VF sum) {
  const F f;
  const auto over = hn::Eq(low, hn::Set(f, -std::numeric_limits<float>::infinity()));
  return hn::IfThenElse(over, hn::NaN(f), sum);
}

float softmax_row(float* x, int64_t n, float scale, bool finite, float* maximum, float* sum) {
  const F f;
  const VF scales = hn::Set(f, scale);
  const VF minus_infinity = hn::Set(f, -std::numeric_limits<float>::infinity());
  VF top = hn::Set(f, *maximum), low = hn::Zero(f);
  for (int64_t j = 0; j < n; j += kLanes) {
    VF v = hn::Mul(hn::LoadU(f, x + j), scales);
    if (j + kLanes <= n) low = hn::Min(v, low);
    if (j + kLanes > n) {
      const auto there = hn::FirstN(f, static_cast<size_t>(n - j));
      low = hn::Min(hn::IfThenElseZero(there, v), low);
      v = hn::IfThenElse(there, v, minus_infinity);
    }
    hn::StoreU(v, f, x + j);
    top = hn::Max(v, top);
  }
  const float old = *maximum;
  const float peak = hn::GetLane(hn::MaxOfLanes(f, top));
  const VF peaks = hn::Set(f, peak);
  VF total = hn::Zero(f);
  for (int64_t j = 0; j < n; j += kLanes) {
    const VF p = exp_of(hn::Sub(hn::LoadU(f, x + j), peaks));
    hn::StoreU(p, f, x + j);
    total = hn::Add(total, p);
  }
  const float factor = peak == old ? 1.0f : std::exp(old - peak);
  *maximum = peak;
  if (finite) total = unless_overflown(low, total);
  *sum = *sum * factor + hn::GetLane(hn::SumOfLanes(f, total));
  return factor;
}

void scale(float* x, int64_t n, float factor) {
  const F f;
  const VF factors = hn::Set(f, factor);
  for (int64_t i = 0; i < n; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(f, x + i), factors), f, x + i);
  }
}

void softmax_lanes(float* x, int64_t n, int64_t rows, float scale_by, bool finite, float* maximum,
                   float* sum, float* factor) {
  const F f;
  const VF scales = hn::Set(f, scale_by);
  for (int64_t r = 0; r < rows; r += kLanes) {
    const VF old = hn::LoadU(f, maximum + r);
    VF top = old, low = hn::Zero(f);
    for (int64_t j = 0; j < n; ++j) {
      VF v = hn::Mul(hn::LoadU(f, x + j * rows + r), scales);
      low = hn::Min(v, low);
      hn::StoreU(v, f, x + j * rows + r);
      top = hn::Max(v, top);
    }
    VF total = hn::Zero(f);
    for (int64_t j = 0; j < n; ++j) {
      const VF p = exp_of(hn::Sub(hn::LoadU(f, x + j * rows + r), top));
      hn::StoreU(p, f, x + j * rows + r);
      total = hn::Add(total, p);
    }
    if (finite) total = unless_overflown(low, total);
    const VF by = exp_of(hn::Sub(old, top));
    hn::StoreU(top, f, maximum + r);
    hn::StoreU(by, f, factor + r);
    hn::StoreU(hn::MulAdd(hn::LoadU(f, sum + r), by, total), f, sum + r);
  }
}

float log_sum_exp(float* x, const float* weights, int64_t n, float scale_by) {
  const F f;
  const VF scales = hn::Set(f, scale_by);
  VF top = hn::Set(f, kLowest), low = hn::Zero(f);
  for (int64_t j = 0; j < n; j += kLanes) {
    const VF v = hn::Mul(hn::LoadU(f, x + j), scales);
    const auto counts = hn::Gt(hn::LoadU(f, weights + j), hn::Zero(f));
    low = hn::Min(hn::IfThenElseZero(counts, v), low);
    hn::StoreU(v, f, x + j);
    top = hn::Max(v, top);
  }
  const float peak = hn::GetLane(hn::MaxOfLanes(f, top));
  const VF peaks = hn::Set(f, peak);
  VF total = hn::Zero(f);
  for (int64_t j = 0; j < n; j += kLanes) {
    const VF p = exp_of(hn::Sub(hn::LoadU(f, x + j), peaks));
    total = hn::MulAdd(hn::LoadU(f, weights + j), p, total);
  }
  total = unless_overflown(low, total);
  return peak + std::log(hn::GetLane(hn::SumOfLanes(f, total)));
}

// out[j] = of(j) for n numbers, a vector of them at a time.
template <class Of>
HWY_INLINE void store_all(int64_t n, float* out, const Of& of) {
  const F f;
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) hn::StoreU(of(j), f, out + j);
  if (j == n) return;
  HWY_ALIGN float rest[kLanes];
  hn::Store(of(j), f, rest);
  std::copy(rest, rest + (n - j), out + j);
}

void add_rows(const float* x, int64_t ld, const float* lse, int64_t rows, int64_t n, float* maximum,
              float* sum) {
  const F f;
  for (int64_t j = 0; j < n; j += kLanes) {
    const VF old = hn::LoadU(f, maximum + j);
    VF top = old;
    for (int64_t r = 0; r < rows; ++r) {
      top = hn::Max(hn::Sub(hn::LoadU(f, x + r * ld + j), hn::Set(f, lse[r])), top);
    }
    VF total = hn::Mul(hn::LoadU(f, sum + j), exp_of(hn::Sub(old, top)));
    for (int64_t r = 0; r < rows; ++r) {
      const VF y = hn::Sub(hn::LoadU(f, x + r * ld + j), hn::Set(f, lse[r]));
      total = hn::Add(total, exp_of(hn::Sub(y, top)));
    }
    hn::StoreU(top, f, maximum + j);
    hn::StoreU(total, f, sum + j);
  }
}

void finish_mean(const float* maximum, const float* sum, int64_t n, float log_count,
                 float* scores) {
  const F f;
  const VF minus_infinity = hn::Set(f, -std::numeric_limits<float>::infinity());
  store_all(n, scores, [&](int64_t j) HWY_ATTR {
    const VF total = hn::LoadU(f, sum + j);
    const VF log_mean =
        hn::Sub(hn::Add(hn::LoadU(f, maximum + j), hn::Log(f, total)), hn::Set(f, log_count));
    return hn::IfThenElse(hn::Gt(total, hn::Zero(f)), log_mean, minus_infinity);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace sqz
HWY_AFTER_NAMESPACE();
#endif
