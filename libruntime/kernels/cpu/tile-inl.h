// Many query rows against a tile of keys in cache: lanes run along the rows, so that neither keys
// nor values are ever transposed and the softmax needs no sums across lanes.
#if defined(SQZ_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SQZ_CPU_TILE_INL_H_
#undef SQZ_CPU_TILE_INL_H_
#else
#define SQZ_CPU_TILE_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/kernels/cpu/load-inl.h"
#include "libruntime/kernels/cpu/offline_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace sqz {
namespace HWY_NAMESPACE {

template <class S>
void to_float_as(const void* in, int64_t n, int64_t dim, float* out) {
  const F f;
  const auto* from = static_cast<const typename S::Element*>(in);
  const int64_t padded = padded_dim(dim);
  for (int64_t j = 0; j < n; ++j) {
    const auto* row = from + j * dim;
    float* to = out + j * padded;
    int64_t c = 0;
    for (; c + kLanes <= dim; c += kLanes) hn::StoreU(load_natural<S>(row + c), f, to + c);
    if (c < padded) {
      std::memset(to + c, 0, static_cast<size_t>(padded - c) * sizeof(float));
    }
    if (c < dim) {
      HWY_ALIGN typename S::Element buffer[kLanes];
      std::memset(buffer, 0, sizeof(buffer));
      std::memcpy(buffer, row + c, static_cast<size_t>(dim - c) * sizeof(buffer[0]));
      hn::StoreU(load_natural<S>(buffer), f, to + c);
    }
  }
}

void to_float(DType dtype, const void* in, int64_t n, int64_t dim, float* out) {
  with_stored(dtype, [&](auto s) HWY_ATTR { to_float_as<decltype(s)>(in, n, dim, out); });
}

// sum[i][v] += the sum over `depth` of left(i, k) b[k][v]: kM x kV vectors stay in registers.
template <int kM, int kV, class Left>
HWY_INLINE void add_products(const Left& left, const float* b, int64_t ldb, int64_t depth,
                             VF (&sum)[kM][kV]) {
  const F f;
  for (int64_t k = 0; k < depth; ++k) {
    VF right[kV];
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) right[v] = hn::LoadU(f, b + k * ldb + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kM; ++i) {
      const VF x = hn::Set(f, left(i, k));
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) sum[i][v] = hn::MulAdd(x, right[v], sum[i][v]);
    }
  }
}

// c[kM, kV vectors] (+)= left b.
template <int kM, int kV, class Left>
HWY_INLINE void multiply_block(const Left& left, const float* b, int64_t ldb, int64_t depth,
                               float* c, int64_t ldc, bool add) {
  const F f;
  VF sum[kM][kV];
#pragma GCC unroll 16
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) {
      sum[i][v] = add ? hn::LoadU(f, c + i * ldc + v * kLanes) : hn::Zero(f);
    }
  }
  add_products(left, b, ldb, depth, sum);
#pragma GCC unroll 16
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) hn::StoreU(sum[i][v], f, c + i * ldc + v * kLanes);
  }
}

template <int kV>
HWY_INLINE void multiply_columns(const float* a, int64_t a_row, int64_t a_col, const float* b,
                                 float* c, int64_t m, int64_t depth, int64_t rows, bool add) {
  int64_t i = 0;
  const auto left = [&](int row, int64_t k) { return a[(i + row) * a_row + k * a_col]; };
  for (; i + 6 <= m; i += 6) {
    multiply_block<6, kV>(left, b, rows, depth, c + i * rows, rows, add);
  }
  for (; i + 2 <= m; i += 2) {
    multiply_block<2, kV>(left, b, rows, depth, c + i * rows, rows, add);
  }
  for (; i < m; ++i) multiply_block<1, kV>(left, b, rows, depth, c + i * rows, rows, add);
}

void multiply(const float* a, int64_t a_row, int64_t a_col, const float* b, float* c, int64_t m,
              int64_t depth, int64_t rows, bool add) {
  constexpr int kWide = kLanes >= 16 ? 4 : 2;  // 6 x 4 of 32 registers, 6 x 2 of 16
  int64_t r = 0;
  for (; r + kWide * kLanes <= rows; r += kWide * kLanes) {
    multiply_columns<kWide>(a, a_row, a_col, b + r, c + r, m, depth, rows, add);
  }
  if constexpr (kWide == 4) {
    for (; r + 2 * kLanes <= rows; r += 2 * kLanes) {
      multiply_columns<2>(a, a_row, a_col, b + r, c + r, m, depth, rows, add);
    }
  }
  for (; r < rows; r += kLanes) {
    multiply_columns<1>(a, a_row, a_col, b + r, c + r, m, depth, rows, add);
  }
}

void scale_lanes(float* x, int64_t n, int64_t rows, const float* factor) {
  const F f;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t r = 0; r < rows; r += kLanes) {
      float* at = x + i * rows + r;
      hn::StoreU(hn::Mul(hn::LoadU(f, at), hn::LoadU(f, factor + r)), f, at);
    }
  }
}

// ---- Which centroid is nearest to each of many points: products stay in registers, 6 points
// against 64 centroids at a time, and only the best so far is written.

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
