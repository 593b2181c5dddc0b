// A few query rows against keys, values or pages read once: lanes run along the head dimension.
#if defined(SQZ_CPU_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SQZ_CPU_STREAM_INL_H_
#undef SQZ_CPU_STREAM_INL_H_
#else
#define SQZ_CPU_STREAM_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/kernels/cpu/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sqz {
namespace HWY_NAMESPACE {

// Puts a whole chunk into packed order; unpack_chunk() takes it back.
template <class S>
HWY_INLINE void pack_chunk(const float* from, float* to) {
#if HWY_TARGET != HWY_SCALAR  // HWY_SCALAR lacks the operation
  if constexpr (S::kInterleaved) {
    const F f;
    VF even, odd;
    hn::LoadInterleaved2(f, from, even, odd);
    hn::StoreU(even, f, to);
    hn::StoreU(odd, f, to + kLanes);
    return;
  }
#endif
  std::memcpy(to, from, kChunk * sizeof(float));
}

template <class S>
HWY_INLINE void unpack_chunk(const float* from, float* to) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (S::kInterleaved) {
    const F f;
    hn::StoreInterleaved2(hn::LoadU(f, from), hn::LoadU(f, from + kLanes), f, to);
    return;
  }
#endif
  std::memcpy(to, from, kChunk * sizeof(float));
}

template <class S>
void pack_as(const float* rows, int64_t stride, int64_t count, int64_t dim, float* out) {
  const int64_t padded = padded_dim(dim);
  for (int64_t r = 0; r < count; ++r) {
    const float* from = rows + r * stride;
    float* to = out + r * padded;
    int64_t c = 0;
    for (; c + kChunk <= dim; c += kChunk) pack_chunk<S>(from + c, to + c);
    std::memset(to + c, 0, static_cast<size_t>(padded - c) * sizeof(float));
    for (int64_t i = 0; c + i < dim; ++i) to[c + packed_place<S>(i)] = from[c + i];
  }
}

void pack(DType dtype, const float* rows, int64_t stride, int64_t count, int64_t dim, float* out) {
  with_stored(dtype, [&](auto s) HWY_ATTR { pack_as<decltype(s)>(rows, stride, count, dim, out); });
}

template <class S>
void unpack_as(const float* packed, int64_t count, int64_t dim, float* rows, int64_t stride) {
  const int64_t padded = padded_dim(dim);
  for (int64_t r = 0; r < count; ++r) {
    const float* from = packed + r * padded;
    float* to = rows + r * stride;
    int64_t c = 0;
    for (; c + kChunk <= dim; c += kChunk) unpack_chunk<S>(from + c, to + c);
    for (int64_t i = 0; c + i < dim; ++i) to[c + i] = from[c + packed_place<S>(i)];
  }
}

void unpack(DType dtype, const float* packed, int64_t count, int64_t dim, float* rows,
            int64_t stride) {
  with_stored(dtype,
              [&](auto s) HWY_ATTR { unpack_as<decltype(s)>(packed, count, dim, rows, stride); });
}

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void store_sums(VF a, VF b, VF c, VF e, float* out) {
  const VF sums[4] = {a, b, c, e};
  for (int j = 0; j < 4; ++j) out[j] = hn::GetLane(sums[j]);
}
#else
// Adds the 128-bit blocks, so that the lowest one holds the total of each of its four lanes.
template <class D>
HWY_INLINE hn::Vec<hn::Full128<float>> fold_blocks(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    return fold_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    (void)d;
    return v;
  }
}

// Stores the four horizontal sums of four vectors.
HWY_INLINE void store_sums(VF a, VF b, VF c, VF e, float* out) {
  const F f;
  const hn::Repartition<double, F> f64;
  const VF ab = hn::Add(hn::InterleaveLower(f, a, b), hn::InterleaveUpper(f, a, b));
  const VF ce = hn::Add(hn::InterleaveLower(f, c, e), hn::InterleaveUpper(f, c, e));
  const auto ab64 = hn::BitCast(f64, ab);
  const auto ce64 = hn::BitCast(f64, ce);
  const VF all = hn::Add(hn::BitCast(f, hn::InterleaveLower(f64, ab64, ce64)),
                         hn::BitCast(f, hn::InterleaveUpper(f64, ab64, ce64)));
  hn::StoreU(fold_blocks(f, all), hn::Full128<float>(), out);
}
#endif

// kRows rows x 4 keys (`n` of them real: the others repeat the last).
template <class S, int kRows>
HWY_INLINE void dots4(const float* packed, int64_t padded, const void* const* keys, int64_t n,
                      int64_t dim, float* out, int64_t ld) {
  const F f;
  const typename S::Element* key[4];
  for (int64_t j = 0; j < 4; ++j) {
    key[j] = static_cast<const typename S::Element*>(keys[j < n ? j : n - 1]);
  }
  VF sum[kRows][4];
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < 4; ++j) sum[r][j] = hn::Zero(f);
  }
  const auto add = [&](int64_t c, const auto& load) HWY_ATTR {
    for (int j = 0; j < 4; ++j) {
      const Pair k = load(key[j] + c);
      for (int r = 0; r < kRows; ++r) {
        const float* q = packed + r * padded + c;
        sum[r][j] = hn::MulAdd(hn::LoadU(f, q), k.a, sum[r][j]);
        sum[r][j] = hn::MulAdd(hn::LoadU(f, q + kLanes), k.b, sum[r][j]);
      }
    }
  };
  int64_t c = 0;
  for (; c + kChunk <= dim; c += kChunk) {
    add(c, [](const typename S::Element* p) HWY_ATTR { return load_pair<S>(p); });
  }
  if (c < dim) {
    add(c, [&](const typename S::Element* p) HWY_ATTR { return load_pair_tail<S>(p, dim - c); });
  }
  for (int r = 0; r < kRows; ++r) {
    float four[4];
    float* to = n >= 4 ? out + r * ld : four;
    store_sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3], to);
    if (n < 4) std::memcpy(out + r * ld, four, static_cast<size_t>(n) * sizeof(float));
  }
}

template <class S>
void dots_as(const float* packed, int64_t rows, const void* const* keys, int64_t n, int64_t dim,
             float* out, int64_t ld, Ahead ahead) {
  const int64_t padded = padded_dim(dim);
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(typename S::Element));
  for (int64_t j = 0; j < n; j += 4) {
    for (int64_t i = j + ahead.distance; i < j + ahead.distance + 4; ++i) {
      if (ahead.has(i)) prefetch_row(keys[i], 0, row_bytes);
    }
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      dots4<S, 4>(packed + r * padded, padded, keys + j, n - j, dim, out + r * ld + j, ld);
    }
    for (; r + 2 <= rows; r += 2) {
      dots4<S, 2>(packed + r * padded, padded, keys + j, n - j, dim, out + r * ld + j, ld);
    }
    if (r < rows) {
      dots4<S, 1>(packed + r * padded, padded, keys + j, n - j, dim, out + r * ld + j, ld);
    }
  }
}

void dots(DType dtype, const float* packed, int64_t rows, const void* const* keys, int64_t n,
          int64_t dim, float* out, int64_t ld, Ahead ahead) {
  with_stored(dtype, [&](auto s) HWY_ATTR {
    dots_as<decltype(s)>(packed, rows, keys, n, dim, out, ld, ahead);
  });
}

// The rows that accumulate_block() prefetches while at value j: row j + ahead.distance, or, if
// `lines` is not 0, so many lines a value of the rows from `next` on.
struct Asking {
  Ahead ahead;
  int64_t lines = 0;
  int64_t next = 0;

  // Prefetches the bytes [begin, begin + kBytes) of a row.
  template <int64_t kBytes>
  HWY_INLINE void at(int64_t j, const void* const* rows, int64_t begin) const {
    if (lines == 0) {
      const int64_t row = j + ahead.distance;
      if (ahead.has(row)) prefetch_row(rows[row], begin, begin + kBytes);
      return;
    }
    constexpr int64_t kLines = (kBytes + 63) / 64;
    for (int64_t line = j * lines; line < (j + 1) * lines; ++line) {
      const int64_t row = next + line / kLines, from = begin + line % kLines * 64;
      if (row < ahead.rows) prefetch_row(rows[row], from, from + 1);
    }
  }
};

// kRows rows x kPairs chunks of dimensions from dimension c on, all values of the tile.
template <class S, int kRows, int kPairs>
HWY_INLINE void accumulate_block(const float* p, int64_t ld, const void* const* values, int64_t n,
                                 int64_t c, int64_t present, float* acc, int64_t padded,
                                 const Asking& asking) {
  using Element = typename S::Element;
  const F f;
  constexpr int64_t size = sizeof(Element);
  Pair sum[kRows][kPairs];
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kPairs; ++k) {
      sum[r][k] = {hn::LoadU(f, acc + r * padded + c + k * kChunk),
                   hn::LoadU(f, acc + r * padded + c + k * kChunk + kLanes)};
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    const Element* value = static_cast<const Element*>(values[j]) + c;
    asking.at<kPairs * kChunk * size>(j, values, c * size);
    for (int k = 0; k < kPairs; ++k) {
      const Pair v = present == kChunk ? load_pair<S>(value + k * kChunk)
                                       : load_pair_tail<S>(value + k * kChunk, present);
      for (int r = 0; r < kRows; ++r) {
        const VF weight = hn::Set(f, p[r * ld + j]);
        sum[r][k] = {hn::MulAdd(weight, v.a, sum[r][k].a), hn::MulAdd(weight, v.b, sum[r][k].b)};
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kPairs; ++k) {
      hn::StoreU(sum[r][k].a, f, acc + r * padded + c + k * kChunk);
      hn::StoreU(sum[r][k].b, f, acc + r * padded + c + k * kChunk + kLanes);
    }
  }
}

template <class S, int kRows>
void accumulate_rows(const float* p, int64_t ld, const void* const* values, int64_t n, int64_t dim,
                     float* acc, const Asking& asking) {
  // Sums in half of the registers: 16 of AVX-512's 32, 8 of the others' 16.
  constexpr int kPairs = kLanes >= 16 ? (kRows >= 4 ? 2 : 4) : kRows >= 4 ? 1 : 2;
  const int64_t padded = padded_dim(dim);
  int64_t c = 0;
  for (; c + kPairs * kChunk <= dim; c += kPairs * kChunk) {
    accumulate_block<S, kRows, kPairs>(p, ld, values, n, c, kChunk, acc, padded, asking);
  }
  if constexpr (kPairs == 4) {
    for (; c + 2 * kChunk <= dim; c += 2 * kChunk) {
      accumulate_block<S, kRows, 2>(p, ld, values, n, c, kChunk, acc, padded, asking);
    }
  }
  for (; c < dim; c += kChunk) {
    const int64_t present = dim - c < kChunk ? dim - c : kChunk;
    accumulate_block<S, kRows, 1>(p, ld, values, n, c, present, acc, padded, asking);
  }
}

// The first rows of p bring the values into the cache. While the other rows are computed, memory is
// idle, so they prefetch the next values. They prefetch slowly, because the memory queue drops
// requests that do not fit.
template <class S>
void accumulate_stretch(const float* p, int64_t ld, int64_t rows, const void* const* values,
                        int64_t n, int64_t dim, float* acc, Ahead ahead) {
  const int64_t padded = padded_dim(dim);
  const Asking idle = {.ahead = ahead, .lines = ahead.distance > 0 ? 2 : 0, .next = n};
  Asking asking = {.ahead = ahead};
  int64_t r = 0;
  // AVX-512 takes two rows over whole values, in the order of memory, not four over half values,
  // unless a half is a line and converting it costs as much as two products.
  if constexpr (kLanes < 16 || std::is_same_v<S, StoredI8>) {
    for (; r + 4 <= rows; r += 4, asking = idle) {
      accumulate_rows<S, 4>(p + r * ld, ld, values, n, dim, acc + r * padded, asking);
    }
  }
  for (; r + 2 <= rows; r += 2, asking = idle) {
    accumulate_rows<S, 2>(p + r * ld, ld, values, n, dim, acc + r * padded, asking);
  }
  if (r < rows) accumulate_rows<S, 1>(p + r * ld, ld, values, n, dim, acc + r * padded, asking);
}

template <class S>
void accumulate_as(const float* p, int64_t ld, int64_t rows, const void* const* values, int64_t n,
                   int64_t dim, float* acc, Ahead ahead) {
  constexpr int64_t kStretch = 128;
  const int64_t stretch = ahead.distance > 0 ? kStretch : n;
  for (int64_t j = 0; j < n; j += stretch, ahead.rows -= stretch) {
    accumulate_stretch<S>(p + j, ld, rows, values + j, n - j < stretch ? n - j : stretch, dim, acc,
                          ahead);
  }
}

void accumulate(DType dtype, const float* p, int64_t ld, int64_t rows, const void* const* values,
                int64_t n, int64_t dim, float* acc, Ahead ahead) {
  with_stored(dtype, [&](auto s) HWY_ATTR {
    accumulate_as<decltype(s)>(p, ld, rows, values, n, dim, acc, ahead);
  });
}

// ---- Bounds of pages: a query against the least and the greatest key of each page.

template <class S>
HWY_INLINE float bound_page(const float* upper, const float* lower, const typename S::Element* min,
                            const typename S::Element* max, int64_t dim) {
  const F f;
  VF high = hn::Zero(f), low = hn::Zero(f);  // two chains: sums wait for each other half as long
  const auto add = [&](int64_t c, const Pair& most, const Pair& least) HWY_ATTR {
    high = hn::MulAdd(hn::LoadU(f, upper + c), most.a, high);
    low = hn::MulAdd(hn::LoadU(f, lower + c), least.a, low);
    high = hn::MulAdd(hn::LoadU(f, upper + c + kLanes), most.b, high);
    low = hn::MulAdd(hn::LoadU(f, lower + c + kLanes), least.b, low);
  };
  int64_t c = 0;
  for (; c + kChunk <= dim; c += kChunk) add(c, load_pair<S>(max + c), load_pair<S>(min + c));
  if (c < dim) add(c, load_pair_tail<S>(max + c, dim - c), load_pair_tail<S>(min + c, dim - c));
  return hn::GetLane(hn::SumOfLanes(f, hn::Add(high, low)));
}

void page_bounds(DType dtype, const float* upper, const float* lower, const void* min,
                 const void* max, int64_t n, int64_t dim, float* out) {
  with_stored(dtype, [&](auto s) HWY_ATTR {
    using Element = typename decltype(s)::Element;
    const auto* least = static_cast<const Element*>(min);
    const auto* most = static_cast<const Element*>(max);
    for (int64_t j = 0; j < n; ++j, least += dim, most += dim) {
      out[j] = bound_page<decltype(s)>(upper, lower, least, most, dim);
    }
  });
}

// ---- Codes of fewer than 8 bits as the numbers that they stand for.

}  // namespace HWY_NAMESPACE
}  // namespace sqz
HWY_AFTER_NAMESPACE();
#endif
