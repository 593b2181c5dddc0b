// Dot products of bfloat16 queries with bfloat16 keys by AVX-512's vdpbf16ps: products are exact,
// sums are float32. Twice as many products an instruction as float32 arithmetic, and nothing to
// convert.
#pragma once

#include <cstdint>

namespace sqz {

struct Ahead;

#if defined(__x86_64__)
// As in CpuKernels. For processors with AVX512_BF16 alone.
bool pack_bf16(const float* rows, int64_t stride, int64_t count, int64_t dim, float* out);
void dots_bf16(const float* packed, int64_t rows, const void* const* keys, int64_t n, int64_t dim,
               float* out, int64_t ld, Ahead ahead);
bool pair_bf16(const float* const* rows, int64_t count, int64_t lanes, int64_t dim, float* out);
void tile_bf16(const float* pairs, int64_t lanes, const void* keys, int64_t n, int64_t dim,
               float* out);
bool has_avx512_bf16();
#endif

}  // namespace sqz
