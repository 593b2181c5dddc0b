// Dot products by AVX-512's instructions for short numbers, as in CpuKernels: BF16 queries and keys
// by vdpbf16ps, whose products are exact and whose sums are float32, twice as many an instruction
// as float32 arithmetic has and nothing to convert; rows of codes with queries of 16 bits by VNNI,
// exact in whole numbers.
#pragma once

#include <cstdint>

namespace sqz {

struct Ahead;

// For processors with AVX512_BF16 alone.
bool pack_bf16(const float* rows, int64_t stride, int64_t count, int64_t dim, float* out);
void dots_bf16(const float* packed, int64_t rows, const void* const* keys, int64_t n, int64_t dim,
               float* out, int64_t ld, Ahead ahead);
bool pair_bf16(const float* const* rows, int64_t count, int64_t lanes, int64_t dim, float* out);
void tile_bf16(const float* pairs, int64_t lanes, const void* keys, int64_t n, int64_t dim,
               float* out);

// With AVX512_VNNI.
bool pack_i16(const float* row, int64_t dim, int16_t* out, float* scale);
bool dots_i16(int bits, const int16_t* packed, const float* scales, int64_t rows,
              const void* const* keys, int64_t n, int64_t dim, float* out, int64_t ld, Ahead ahead);

}  // namespace sqz
