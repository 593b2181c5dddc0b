// Dot products by AVX-512's instructions for short numbers; the functions are those of CpuKernels.
//
// BF16 queries and keys meet in vdpbf16ps. Its products are exact, its sums are float32, it makes
// twice as many products an instruction as float32 arithmetic does, and nothing is converted. Rows
// of codes meet queries of 16 bits in VNNI, exactly.
#pragma once

#include <cstdint>

namespace sqz {

struct Ahead;

// These need AVX512_BF16.
bool pack_bf16(const float* rows, int64_t stride, int64_t count, int64_t dim, float* out);
void dots_bf16(const float* packed, int64_t rows, const void* const* keys, int64_t n, int64_t dim,
               float* out, int64_t ld, Ahead ahead);
bool pair_bf16(const float* const* rows, int64_t count, int64_t lanes, int64_t dim, float* out);
void tile_bf16(const float* pairs, int64_t lanes, const void* keys, int64_t n, int64_t dim,
               float* out);

// These need AVX512_VNNI.
bool pack_i16(const float* row, int64_t dim, int16_t* out, float* scale);
void dots_i16(const int16_t* packed, const float* scales, int64_t rows, const void* const* keys,
              int64_t n, int64_t dim, float* out, int64_t ld, Ahead ahead);

}  // namespace sqz
