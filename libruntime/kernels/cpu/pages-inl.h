// Bounds of pages: query rows against the least and the greatest key of each page. Lanes run along
// the head dimension, as in stream-inl.h.
#if defined(SQZ_CPU_PAGES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SQZ_CPU_PAGES_INL_H_
#undef SQZ_CPU_PAGES_INL_H_
#else
#define SQZ_CPU_PAGES_INL_H_
#endif

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/kernels/cpu/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sqz {
namespace HWY_NAMESPACE {

// kRows rows against one page.
template <class S, int kRows>
HWY_INLINE void bound_page(const float* upper, const float* lower, int64_t padded,
                           const typename S::Element* min, const typename S::Element* max,
                           int64_t dim, float* out, int64_t ld) {
  const F f;
  VF high[kRows], low[kRows];  // two chains a row: sums wait for each other half as long
  for (int r = 0; r < kRows; ++r) high[r] = low[r] = hn::Zero(f);
  const auto add = [&](int64_t c, const Pair& most, const Pair& least) HWY_ATTR {
    for (int r = 0; r < kRows; ++r) {
      const float* up = upper + r * padded + c;
      const float* down = lower + r * padded + c;
      high[r] = hn::MulAdd(hn::LoadU(f, up), most.a, high[r]);
      low[r] = hn::MulAdd(hn::LoadU(f, down), least.a, low[r]);
      high[r] = hn::MulAdd(hn::LoadU(f, up + kLanes), most.b, high[r]);
      low[r] = hn::MulAdd(hn::LoadU(f, down + kLanes), least.b, low[r]);
    }
  };
  int64_t c = 0;
  for (; c + kChunk <= dim; c += kChunk) add(c, load_pair<S>(max + c), load_pair<S>(min + c));
  if (c < dim) add(c, load_pair_tail<S>(max + c, dim - c), load_pair_tail<S>(min + c, dim - c));
  for (int r = 0; r < kRows; ++r) {
    out[r * ld] = hn::GetLane(hn::SumOfLanes(f, hn::Add(high[r], low[r])));
  }
}

template <class S>
void page_bounds_as(const float* upper, const float* lower, int64_t rows, const void* min,
                    const void* max, int64_t n, int64_t dim, float* out, int64_t ld) {
  const auto* least = static_cast<const typename S::Element*>(min);
  const auto* most = static_cast<const typename S::Element*>(max);
  const int64_t padded = padded_dim(dim);
  for (int64_t j = 0; j < n; ++j) {
    const int64_t at = j * dim;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      bound_page<S, 4>(upper + r * padded, lower + r * padded, padded, least + at, most + at, dim,
                       out + r * ld + j, ld);
    }
    for (; r < rows; ++r) {
      bound_page<S, 1>(upper + r * padded, lower + r * padded, padded, least + at, most + at, dim,
                       out + r * ld + j, ld);
    }
  }
}

void page_bounds(DType dtype, const float* upper, const float* lower, int64_t rows, const void* min,
                 const void* max, int64_t n, int64_t dim, float* out, int64_t ld) {
  with_stored(dtype, [&](auto s) HWY_ATTR {
    page_bounds_as<decltype(s)>(upper, lower, rows, min, max, n, dim, out, ld);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace sqz
HWY_AFTER_NAMESPACE();
#endif
