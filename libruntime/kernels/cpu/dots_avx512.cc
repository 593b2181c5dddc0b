#include "libruntime/kernels/cpu/dots_avx512.h"

#if defined(__x86_64__)
#pragma GCC diagnostic push
#if !defined(__clang__)  // gcc 12 takes its own _mm512_undefined_ps() for a mistake
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <bit>
#include <cmath>

#include "libruntime/kernels/cpu/kernels.h"

// Integer functions contain no BF16 instructions, because only the BF16 intrinsics emit them. So
// they also run on processors without BF16.
#define SQZ_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")))
#define SQZ_AVX512_INLINE SQZ_AVX512 inline __attribute__((always_inline))

namespace sqz {
namespace {

constexpr int64_t kNumbers = 32;  // dimensions of one vector
constexpr int kAtOnce = 4;        // keys
// A sum of products of 8 and 16 bits over more dimensions might not fit 32 bits.
constexpr int64_t kMostNumbers = 512;

// The lanes of a vector that hold one of the `left` numbers that a row still has.
inline __mmask32 present(int64_t left) {
  return static_cast<__mmask32>((uint64_t{1} << std::min(kNumbers, left)) - 1);
}

// How dots4() reads a kind of stored rows. chunk() loads numbers [32 c, 32 c + 32) of a row.
// add_products() and add() sum their products with a query, four bytes a lane. finish() turns sums
// into floats. Nothing beyond a row is touched, because a mapping may end there.
struct BFloat16Rows {
  int64_t dim;
  int64_t row_bytes() const { return 2 * dim; }
  template <bool kWhole>
  SQZ_AVX512_INLINE __m512i chunk(const std::byte* row, int64_t c) const {
    const std::byte* from = row + 2 * c * kNumbers;
    return kWhole ? _mm512_loadu_si512(from)
                  : _mm512_maskz_loadu_epi16(present(dim - c * kNumbers), from);
  }
  SQZ_AVX512_INLINE static __m512i add_products(__m512i sum, __m512i q, __m512i k) {
    return _mm512_castps_si512(
        _mm512_dpbf16_ps(_mm512_castsi512_ps(sum), (__m512bh)q, (__m512bh)k));
  }
  SQZ_AVX512_INLINE static __m512i add(__m512i a, __m512i b) {
    return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
  }
  SQZ_AVX512_INLINE __m128 finish(__m128i sum, int64_t /*row*/) const {
    return _mm_castsi128_ps(sum);
  }
};

// Rows of integers. Queries have 16 bits a number and one scale a row.
struct WholeNumbers {
  int64_t dim;
  const float* scales;
  int64_t row_bytes() const { return dim; }
  SQZ_AVX512_INLINE static __m512i add_products(__m512i sum, __m512i q, __m512i k) {
    return _mm512_dpwssd_epi32(sum, q, k);
  }
  SQZ_AVX512_INLINE static __m512i add(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  SQZ_AVX512_INLINE __m128 finish(__m128i sum, int64_t row) const {
    return _mm_mul_ps(_mm_cvtepi32_ps(sum), _mm_set1_ps(scales[row]));
  }
};

// Rows of 8 bits a number.
struct Rows8 : WholeNumbers {
  template <bool kWhole>
  SQZ_AVX512_INLINE __m512i chunk(const std::byte* row, int64_t c) const {
    const __mmask32 there = kWhole ? ~__mmask32{0} : present(dim - c * kNumbers);
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(there, row + c * kNumbers));
  }
};

// Adds pairs of lanes of a and b and puts the sums side by side: one step of two horizontal sums.
template <class Stored>
SQZ_AVX512_INLINE __m512i add_pairs(__m512i a, __m512i b) {
  return Stored::add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
template <class Stored>
SQZ_AVX512_INLINE __m512i add_halves(__m512i a, __m512i b) {
  return Stored::add(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// Query rows [first, first + kRows). They are in registers if the head dimension is known to be
// short enough (kChunks > 0), else in memory.
template <int kRows, int kChunks>
struct QueryRows {
  const int16_t* packed;
  int64_t padded, first;
  __m512i vector[kRows][kChunks + 1];
  SQZ_AVX512_INLINE QueryRows(const int16_t* queries, int64_t dim, int64_t row)
      : packed(queries + row * padded_dim(dim)), padded(padded_dim(dim)), first(row) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kChunks; ++c) vector[r][c] = load(r, c);
    }
  }
  SQZ_AVX512_INLINE __m512i load(int r, int64_t c) const {
    return _mm512_loadu_si512(packed + r * padded + c * kNumbers);
  }
  SQZ_AVX512_INLINE __m512i at(int r, int64_t c) const {
    return kChunks > 0 ? vector[r][c] : load(r, c);
  }
  int64_t chunks() const {
    return kChunks > 0 ? kChunks : padded / kNumbers;
  }
};

// One key against kRows rows, lane by lane. Key by key, so that memory is walked in its order: the
// processor's own prefetchers see a stream.
template <int kRows, int kChunks, class Stored>
SQZ_AVX512_INLINE void products(const Stored& stored, const QueryRows<kRows, kChunks>& query,
                                const void* key, __m512i (&sum)[kRows]) {
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) sum[r] = _mm512_setzero_si512();
  const int64_t chunks = query.chunks();
#pragma GCC unroll 4
  for (int64_t c = 0; c < chunks; ++c) {
    const __m512i k = stored.template chunk<(kChunks > 0)>(static_cast<const std::byte*>(key), c);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = Stored::add_products(sum[r], query.at(r, c), k);
  }
}

// kRows rows x 4 keys (`n` of them real: the others repeat the last).
template <int kRows, int kChunks, class Stored>
SQZ_AVX512_INLINE void dots4(const Stored& stored, const QueryRows<kRows, kChunks>& query,
                             const void* const* keys, int64_t n, float* out, int64_t ld) {
  __m512i halves[2][kRows];
#pragma GCC unroll 2
  for (int j = 0; j < kAtOnce; j += 2) {
    __m512i a[kRows], b[kRows];
    products(stored, query, keys[j < n ? j : n - 1], a);
    products(stored, query, keys[j + 1 < n ? j + 1 : n - 1], b);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) halves[j / 2][r] = add_pairs<Stored>(a[r], b[r]);
  }
  const auto four = static_cast<__mmask8>(n >= kAtOnce ? 0xf : (1 << n) - 1);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    // Lane 4 i + j is a part of the product with key j.
    __m512i parts = add_halves<Stored>(halves[0][r], halves[1][r]);
    parts = Stored::add(parts, _mm512_shuffle_i64x2(parts, parts, 0x4e));
    parts = Stored::add(parts, _mm512_shuffle_i64x2(parts, parts, 0xb1));
    _mm_mask_storeu_ps(out + r * ld, four,
                       stored.finish(_mm512_castsi512_si128(parts), query.first + r));
  }
}

template <int kRows, int kChunks, class Stored>
SQZ_AVX512 void dots_rows(const Stored& stored, const int16_t* packed, int64_t row,
                          const void* const* keys, int64_t n, float* out, int64_t ld, Ahead ahead) {
  const QueryRows<kRows, kChunks> query(packed, stored.dim, row);
  for (int64_t j = 0; j < n; j += kAtOnce) {
    for (int64_t i = j + ahead.distance; i < j + ahead.distance + kAtOnce; ++i) {
      if (ahead.has(i)) prefetch_row(keys[i], 0, stored.row_bytes());
    }
    dots4(stored, query, keys + j, n - j, out + row * ld + j, ld);
  }
}

template <int kChunks, class Stored>
SQZ_AVX512 void dots_all(const Stored& stored, const int16_t* packed, int64_t rows,
                         const void* const* keys, int64_t n, float* out, int64_t ld, Ahead ahead) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, ahead = {}) {
    dots_rows<4, kChunks>(stored, packed, r, keys, n, out, ld, ahead);
  }
  for (; r + 2 <= rows; r += 2, ahead = {}) {
    dots_rows<2, kChunks>(stored, packed, r, keys, n, out, ld, ahead);
  }
  if (r < rows) dots_rows<1, kChunks>(stored, packed, r, keys, n, out, ld, ahead);
}

template <class Stored>
SQZ_AVX512 void dots_of(const Stored& stored, const int16_t* packed, int64_t rows,
                        const void* const* keys, int64_t n, float* out, int64_t ld, Ahead ahead) {
  switch (stored.dim) {
    case 64:
      return dots_all<2>(stored, packed, rows, keys, n, out, ld, ahead);
    case 96:
      return dots_all<3>(stored, packed, rows, keys, n, out, ld, ahead);
    case 128:
      return dots_all<4>(stored, packed, rows, keys, n, out, ld, ahead);
    default:
      return dots_all<0>(stored, packed, rows, keys, n, out, ld, ahead);
  }
}

// The greatest of the 16-bit numbers that a query is rounded to.
constexpr int kLargest = 127 * 256 + 127;

// kTile keys x kVectors vectors of rows stay in registers over the whole depth.
template <int kTile, int kVectors>
SQZ_AVX512_INLINE void tile_block(const uint32_t* queries, int64_t lanes, const uint32_t* keys,
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
SQZ_AVX512 void tile_columns(const uint32_t* queries, int64_t lanes, const uint32_t* keys,
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

SQZ_AVX512 bool pack_i16(const float* row, int64_t dim, int16_t* out, float* scale) {
  if (dim > kMostNumbers) return false;
  const auto load = [&](int64_t i) SQZ_AVX512 {
    const int64_t present = std::clamp<int64_t>(dim - i, 0, 16);
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << present) - 1), row + i);
  };
  __m512 most = _mm512_setzero_ps();
  for (int64_t i = 0; i < dim; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(load(i)));
  const float largest = _mm512_reduce_max_ps(most);
  const __m512 inverse = _mm512_set1_ps(largest > 0 ? kLargest / largest : 0);
  *scale = largest / kLargest;
  for (int64_t i = 0; i < padded_dim(dim); i += 16) {
    const __m512i numbers = _mm512_cvtps_epi32(_mm512_mul_ps(load(i), inverse));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtsepi32_epi16(numbers));
  }
  return std::isfinite(largest) && std::isnormal(*scale);
}

SQZ_AVX512 void dots_i16(const int16_t* packed, const float* scales, int64_t rows,
                         const void* const* keys, int64_t n, int64_t dim, float* out, int64_t ld,
                         Ahead ahead) {
  dots_of(Rows8{{dim, scales}}, packed, rows, keys, n, out, ld, ahead);
}

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

SQZ_AVX512 void dots_bf16(const float* packed, int64_t rows, const void* const* keys, int64_t n,
                          int64_t dim, float* out, int64_t ld, Ahead ahead) {
  dots_of(BFloat16Rows{dim}, reinterpret_cast<const int16_t*>(packed), rows, keys, n, out, ld,
          ahead);
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

}  // namespace sqz
#endif
