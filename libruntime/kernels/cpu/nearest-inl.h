// Which centroid is nearest to each of many points: products stay in registers, 6 points against 64
// centroids at a time, and only the best so far is written.
#if defined(SQZ_CPU_NEAREST_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SQZ_CPU_NEAREST_INL_H_
#undef SQZ_CPU_NEAREST_INL_H_
#else
#define SQZ_CPU_NEAREST_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/kernels/cpu/load-inl.h"
#include "libruntime/kernels/cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sqz {
namespace HWY_NAMESPACE {

constexpr int64_t kNearestRows = 6;
constexpr int64_t kNearestBlock = 40 * kNearestRows;  // points that meet a panel while it is in L1

// Lane l of row r: the best product with centroids l, l + kLanes, .. and the lowest of these.
struct NearestLanes {
  HWY_ALIGN float product[kNearestBlock * kLanes];
  HWY_ALIGN int32_t label[kNearestBlock * kLanes];
};

// kM points against kV vectors of one panel; `first` is the number of the first centroid.
template <int kM, int kV>
HWY_INLINE void nearest_tile(const float* x, int64_t dim, const float* panel, int64_t first,
                             float* products, int32_t* labels) {
  const F f;
  const hn::RebindToSigned<F> integers;
  VF sum[kM][kV];
  for (int i = 0; i < kM; ++i) {
    for (int v = 0; v < kV; ++v) sum[i][v] = hn::Zero(f);
  }
  const auto point = [&](int i, int64_t k) { return x[i * dim + k]; };
  add_products(point, panel, kPanel, dim, sum);
  for (int i = 0; i < kM; ++i) {
    VF best = hn::Load(f, products + i * kLanes);
    auto label = hn::Load(integers, labels + i * kLanes);
    for (int v = 0; v < kV; ++v) {
      const auto better = hn::Gt(sum[i][v], best);
      const auto number = hn::Set(integers, static_cast<int32_t>(first + v * kLanes));
      best = hn::IfThenElse(better, sum[i][v], best);
      label = hn::IfThenElse(hn::RebindMask(integers, better), number, label);
    }
    hn::Store(best, f, products + i * kLanes);
    hn::Store(label, integers, labels + i * kLanes);
  }
}

template <int kM>
HWY_INLINE void nearest_panel(const float* x, int64_t dim, const float* panel, int64_t first,
                              float* products, int32_t* labels) {
  constexpr int kWide = kLanes >= 16 ? 4 : 2;  // 6 x 4 of 32 registers, 6 x 2 of 16
  for (int64_t c = 0; c < kPanel; c += kWide * kLanes) {
    nearest_tile<kM, kWide>(x, dim, panel + c, first + c, products, labels);
  }
}

void nearest(const float* x, int64_t n, int64_t dim, const float* panels, int64_t clusters,
             float* products, int64_t* labels) {
  NearestLanes lanes;
  for (int64_t begin = 0; begin < n; begin += kNearestBlock) {
    const int64_t count = std::min(kNearestBlock, n - begin);
    const float* points = x + begin * dim;
    std::fill_n(lanes.product, count * kLanes, -std::numeric_limits<float>::infinity());
    std::fill_n(lanes.label, count * kLanes, 0);
    for (int64_t first = 0; first < clusters; first += kPanel) {
      const float* panel = panels + first * dim;
      int64_t i = 0;
      for (; i + kNearestRows <= count; i += kNearestRows) {
        nearest_panel<kNearestRows>(points + i * dim, dim, panel, first, lanes.product + i * kLanes,
                                    lanes.label + i * kLanes);
      }
      for (; i < count; ++i) {
        nearest_panel<1>(points + i * dim, dim, panel, first, lanes.product + i * kLanes,
                         lanes.label + i * kLanes);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      float best = -std::numeric_limits<float>::infinity();
      int64_t label = 0;
      for (int64_t l = 0; l < kLanes; ++l) {
        const float product = lanes.product[i * kLanes + l];
        const int64_t candidate = lanes.label[i * kLanes + l] + l;
        if (product > best || (product == best && candidate < label)) {
          best = product;
          label = candidate;
        }
      }
      products[begin + i] = best;
      labels[begin + i] = label;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sqz
HWY_AFTER_NAMESPACE();
#endif
