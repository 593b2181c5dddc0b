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

// The sums of 4 x 4 vectors: block r of the result holds those of sum[r].
template <int kRows>
SQZ_AVX512_BF16_INLINE __m512 sums(const __m512 (&sum)[kRows][kKeys]) {
  __m512 row[4];
  for (int r = 0; r < 4; ++r) {
    const auto& s = sum[r < kRows ? r : kRows - 1];
    row[r] = add_halves(add_pairs(s[0], s[1]), add_pairs(s[2], s[3]));
  }
  const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(row[0], row[1], 0x44),
                                 _mm512_shuffle_f32x4(row[0], row[1], 0xee));
  const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(row[2], row[3], 0x44),
                                 _mm512_shuffle_f32x4(row[2], row[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

template <int kRows>
SQZ_AVX512_BF16_INLINE void add_chunk(const uint16_t* packed, int64_t stride, __m512i key, int j,
                                      __m512 (&sum)[kRows][kKeys]) {
  for (int r = 0; r < kRows; ++r) {
    const __m512i q = _mm512_loadu_si512(packed + r * stride);
    sum[r][j] = _mm512_dpbf16_ps(sum[r][j], (__m512bh)q, (__m512bh)key);
  }
}

// kRows rows x 4 keys (`n` of them real: the others repeat the last).
template <int kRows>
SQZ_AVX512_BF16 void dots4(const uint16_t* packed, int64_t stride, const void* const* keys,
                           int64_t n, int64_t dim, float* out, int64_t ld) {
  const uint16_t* row[kKeys];
  for (int64_t j = 0; j < kKeys; ++j) {
    row[j] = static_cast<const uint16_t*>(keys[j < n ? j : n - 1]);
  }
  __m512 sum[kRows][kKeys];
  for (auto& s : sum) {
    for (__m512& x : s) x = _mm512_setzero_ps();
  }
  // Key by key, so that memory is walked in its order: the processor's own prefetchers see a
  // stream.
  const int64_t whole = dim / kChunk * kChunk;
  // Nothing beyond a row is touched: it may be the end of a mapping.
  const auto present = static_cast<__mmask32>((uint32_t{1} << (dim - whole)) - 1);
#pragma GCC unroll 4
  for (int j = 0; j < kKeys; ++j) {
    for (int64_t c = 0; c < whole; c += kChunk) {
      add_chunk<kRows>(packed + c, stride, _mm512_loadu_si512(row[j] + c), j, sum);
    }
    if (present != 0) {
      const __m512i key = _mm512_maskz_loadu_epi16(present, row[j] + whole);
      add_chunk<kRows>(packed + whole, stride, key, j, sum);
    }
  }
  const __m512 total = sums<kRows>(sum);
  const auto four = static_cast<__mmask8>(n >= kKeys ? 0xf : (1 << n) - 1);
  _mm_mask_storeu_ps(out, four, _mm512_castps512_ps128(total));
  if constexpr (kRows > 1) _mm_mask_storeu_ps(out + ld, four, _mm512_extractf32x4_ps(total, 1));
  if constexpr (kRows > 2) {
    _mm_mask_storeu_ps(out + 2 * ld, four, _mm512_extractf32x4_ps(total, 2));
    _mm_mask_storeu_ps(out + 3 * ld, four, _mm512_extractf32x4_ps(total, 3));
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

SQZ_AVX512_BF16 void dots_bf16(const float* packed, int64_t rows, const void* const* keys,
                               int64_t n, int64_t dim, float* out, int64_t ld,
                               const void* const* ahead) {
  const auto* query = reinterpret_cast<const uint16_t*>(packed);
  const int64_t stride = padded_dim(dim), row_bytes = 2 * dim;
  for (int64_t j = 0; j < n; j += kKeys) {
    for (int64_t i = j; ahead != nullptr && i < j + kKeys && i < n; ++i) {
      prefetch_row(ahead[i], row_bytes);
    }
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      dots4<4>(query + r * stride, stride, keys + j, n - j, dim, out + r * ld + j, ld);
    }
    for (; r + 2 <= rows; r += 2) {
      dots4<2>(query + r * stride, stride, keys + j, n - j, dim, out + r * ld + j, ld);
    }
    if (r < rows) dots4<1>(query + r * stride, stride, keys + j, n - j, dim, out + r * ld + j, ld);
  }
}

bool has_avx512_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1u << 5) != 0;
}

}  // namespace sqz
#endif
