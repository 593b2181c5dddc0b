// Products of rows of codes with queries of 16 bits, exact in whole numbers, for processors with
// AVX-512 VNNI: pack_i16 and dots_i16 of CpuKernels.
#pragma once

#include <cstdint>

namespace sqz {

struct Ahead;

bool has_avx512_vnni();
bool pack_i16(const float* row, int64_t dim, int16_t* out, float* scale);
bool dots_i16(int bits, const int16_t* packed, const float* scales, int64_t rows,
              const void* const* keys, int64_t n, int64_t dim, float* out, int64_t ld, Ahead ahead);

}  // namespace sqz
