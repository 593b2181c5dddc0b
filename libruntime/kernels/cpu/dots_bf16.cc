#include "libruntime/kernels/cpu/dots_bf16.h"

#if defined(__x86_64__)
#include <cpuid.h>
#pragma GCC diagnostic push
#if !defined(__clang__)  // gcc 12 takes its own _mm512_undefined_ps() for a mistake
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <bit>

#include "libruntime/kernels/cpu/kernels.h"

#define SQZ_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define SQZ_AVX512_BF16_INLINE SQZ_AVX512_BF16 inline __attribute__((always_inline))

namespace sqz {
namespace {

constexpr int64_t kChunk = 32;  // dimensions of one vector
constexpr int kKeys = 4;        // at once

// a and b side by side, pairs of lanes added: half of two horizontal sums.
SQZ_AVX512_BF16_INLINE __m512 add_pairs(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
SQZ_AVX512_BF16_INLINE __m512 add_halves(__m512 a, __m512 b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

// Query rows as dots4() wants them: in registers if the head dimension is known to be short enough,
// else where they are.
template <int kRows, int kChunks>
struct QueryRows {
  __m512i vector[kRows][kChunks];
  SQZ_AVX512_BF16_INLINE QueryRows(const uint16_t* packed, int64_t stride) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kChunks; ++c) {
        vector[r][c] = _mm512_loadu_si512(packed + r * stride + c * kChunk);
      }
    }
  }
  SQZ_AVX512_BF16_INLINE __m512i at(int r, int64_t c) const {
    return vector[r][c];
  }
  static constexpr int64_t chunks(int64_t) {
    return kChunks;
  }
};
template <int kRows>
struct QueryRows<kRows, 0> {
  const uint16_t* packed;
  int64_t stride;
  SQZ_AVX512_BF16_INLINE QueryRows(const uint16_t* p, int64_t s) : packed(p), stride(s) {}
  SQZ_AVX512_BF16_INLINE __m512i at(int r, int64_t c) const {
    return _mm512_loadu_si512(packed + r * stride + c * kChunk);
  }
  static constexpr int64_t chunks(int64_t dim) { return dim / kChunk; }
};

// One key against kRows rows, lane by lane. Key by key, so that memory is walked in its order: the
// processor's own prefetchers see a stream.
template <int kRows, int kChunks>
SQZ_AVX512_BF16_INLINE void products(const QueryRows<kRows, kChunks>& query, const uint16_t* key,
                                     int64_t dim, __m512 (&sum)[kRows]) {
  const int64_t chunks = query.chunks(dim);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) sum[r] = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int64_t c = 0; c < chunks; ++c) {
    const __m512i k = _mm512_loadu_si512(key + c * kChunk);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)query.at(r, c), (__m512bh)k);
    }
  }
  if constexpr (kChunks == 0) {
    // Nothing beyond a row is touched: it may be the end of a mapping.
    const auto present = static_cast<__mmask32>((uint32_t{1} << (dim % kChunk)) - 1);
    if (present == 0) return;
    const __m512i k = _mm512_maskz_loadu_epi16(present, key + chunks * kChunk);
    for (int r = 0; r < kRows; ++r) {
      sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)query.at(r, chunks), (__m512bh)k);
    }
  }
}

// kRows rows x 4 keys (`n` of them real: the others repeat the last).
template <int kRows, int kChunks>
SQZ_AVX512_BF16_INLINE void dots4(const QueryRows<kRows, kChunks>& query, const void* const* keys,
                                  int64_t n, int64_t dim, float* out, int64_t ld) {
  __m512 row[4];  // of sums by fours: lane 4 i + j is a part of row . key j
  {
    __m512 halves[2][kRows];
#pragma GCC unroll 2
    for (int j = 0; j < kKeys; j += 2) {
      __m512 a[kRows], b[kRows];
      products(query, static_cast<const uint16_t*>(keys[j < n ? j : n - 1]), dim, a);
      products(query, static_cast<const uint16_t*>(keys[j + 1 < n ? j + 1 : n - 1]), dim, b);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) halves[j / 2][r] = add_pairs(a[r], b[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      row[r] = add_halves(halves[0][r < kRows ? r : 0], halves[1][r < kRows ? r : 0]);
    }
  }
  const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(row[0], row[1], 0x44),
                                 _mm512_shuffle_f32x4(row[0], row[1], 0xee));
  const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(row[2], row[3], 0x44),
                                 _mm512_shuffle_f32x4(row[2], row[3], 0xee));
  const __m512 total =
      _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  const auto four = static_cast<__mmask8>(n >= kKeys ? 0xf : (1 << n) - 1);
  _mm_mask_storeu_ps(out, four, _mm512_castps512_ps128(total));
  if constexpr (kRows > 1) _mm_mask_storeu_ps(out + ld, four, _mm512_extractf32x4_ps(total, 1));
  if constexpr (kRows > 2) {
    _mm_mask_storeu_ps(out + 2 * ld, four, _mm512_extractf32x4_ps(total, 2));
    _mm_mask_storeu_ps(out + 3 * ld, four, _mm512_extractf32x4_ps(total, 3));
  }
}

template <int kRows, int kChunks>
SQZ_AVX512_BF16 void dots_rows(const uint16_t* packed, const void* const* keys, int64_t n,
                               int64_t dim, float* out, int64_t ld, Ahead ahead) {
  const QueryRows<kRows, kChunks> query(packed, padded_dim(dim));
  for (int64_t j = 0; j < n; j += kKeys) {
    for (int64_t i = j + ahead.distance; i < j + ahead.distance + kKeys; ++i) {
      if (ahead.has(i)) prefetch_row(keys[i], 0, 2 * dim);
    }
    dots4(query, keys + j, n - j, dim, out + j, ld);
  }
}

template <int kRows>
SQZ_AVX512_BF16 void dots_dim(const uint16_t* packed, const void* const* keys, int64_t n,
                              int64_t dim, float* out, int64_t ld, Ahead ahead) {
  switch (dim) {
    case 64:
      return dots_rows<kRows, 2>(packed, keys, n, dim, out, ld, ahead);
    case 96:
      return dots_rows<kRows, 3>(packed, keys, n, dim, out, ld, ahead);
    case 128:
      return dots_rows<kRows, 4>(packed, keys, n, dim, out, ld, ahead);
    default:
      return dots_rows<kRows, 0>(packed, keys, n, dim, out, ld, ahead);
  }
}

// kTile keys x kVectors vectors of rows stay in registers over the whole depth.
template <int kTile, int kVectors>
SQZ_AVX512_BF16_INLINE void tile_block(const uint32_t* queries, int64_t lanes, const uint32_t* keys,
                                       int64_t pairs, float* out) {
  __m512 sum[kTile][kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kTile; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[j][v] = _mm512_setzero_ps();
  }
  for (int64_t c = 0; c < pairs; ++c) {
    __m512i q[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) q[v] = _mm512_loadu_si512(queries + c * lanes + 16 * v);
#pragma GCC unroll 8
    for (int j = 0; j < kTile; ++j) {
      const __m512i key = _mm512_set1_epi32(static_cast<int>(keys[j * pairs + c]));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[j][v] = _mm512_dpbf16_ps(sum[j][v], (__m512bh)q[v], (__m512bh)key);
      }
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kTile; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(out + j * lanes + 16 * v, sum[j][v]);
  }
}

template <int kVectors>
SQZ_AVX512_BF16 void tile_columns(const uint32_t* queries, int64_t lanes, const uint32_t* keys,
                                  int64_t n, int64_t pairs, float* out) {
  int64_t j = 0;
  for (; j + 6 <= n; j += 6) {
    tile_block<6, kVectors>(queries, lanes, keys + j * pairs, pairs, out + j * lanes);
  }
  for (; j < n; ++j) {
    tile_block<1, kVectors>(queries, lanes, keys + j * pairs, pairs, out + j * lanes);
  }
}

}  // namespace

bool pack_bf16(const float* rows, int64_t stride, int64_t count, int64_t dim, float* out) {
  const int64_t padded = padded_dim(dim);
  auto* to = reinterpret_cast<uint16_t*>(out);
  uint32_t rest = 0;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < padded; ++c) {
      const uint32_t bits = c < dim ? std::bit_cast<uint32_t>(rows[r * stride + c]) : 0;
      to[r * padded + c] = static_cast<uint16_t>(bits >> 16);
      rest |= bits & 0xffffu;
    }
  }
  return rest == 0;
}

void dots_bf16(const float* packed, int64_t rows, const void* const* keys, int64_t n, int64_t dim,
               float* out, int64_t ld, Ahead ahead) {
  const auto* query = reinterpret_cast<const uint16_t*>(packed);
  const int64_t stride = padded_dim(dim);
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, ahead = {}) {
    dots_dim<4>(query + r * stride, keys, n, dim, out + r * ld, ld, ahead);
  }
  for (; r + 2 <= rows; r += 2, ahead = {}) {
    dots_dim<2>(query + r * stride, keys, n, dim, out + r * ld, ld, ahead);
  }
  if (r < rows) dots_dim<1>(query + r * stride, keys, n, dim, out + r * ld, ld, ahead);
}

bool pair_bf16(const float* const* rows, int64_t count, int64_t lanes, int64_t dim, float* out) {
  auto* to = reinterpret_cast<uint32_t*>(out);
  uint32_t rest = dim % 2 == 0 ? 0 : 1;
  for (int64_t r = 0; r < lanes; ++r) {
    for (int64_t c = 0; c + 1 < dim; c += 2) {
      const uint32_t low = r < count ? std::bit_cast<uint32_t>(rows[r][c]) : 0;
      const uint32_t high = r < count ? std::bit_cast<uint32_t>(rows[r][c + 1]) : 0;
      to[c / 2 * lanes + r] = low >> 16 | (high & 0xffff0000u);
      rest |= (low | high) & 0xffffu;
    }
  }
  return rest == 0;
}

void tile_bf16(const float* pairs, int64_t lanes, const void* keys, int64_t n, int64_t dim,
               float* out) {
  const auto* queries = reinterpret_cast<const uint32_t*>(pairs);
  const auto* key = static_cast<const uint32_t*>(keys);
  int64_t r = 0;
  for (; r + 64 <= lanes; r += 64) {
    tile_columns<4>(queries + r, lanes, key, n, dim / 2, out + r);
  }
  for (; r < lanes; r += 16) tile_columns<1>(queries + r, lanes, key, n, dim / 2, out + r);
}

bool has_avx512_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1u << 5) != 0;
}

}  // namespace sqz
#endif
