// Codes of fewer than 8 bits as the numbers that they stand for.
#if defined(SQZ_CPU_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SQZ_CPU_CODES_INL_H_
#undef SQZ_CPU_CODES_INL_H_
#else
#define SQZ_CPU_CODES_INL_H_
#endif

#include <algorithm>

#include "formats/coded_rows.h"
#include "libruntime/kernels/cpu/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sqz {
namespace HWY_NAMESPACE {

// The numbers of one part of a row: the codes that begin at bit `shift` of each byte.
HWY_INLINE void decode_part(const uint8_t* codes, int64_t count, int shift, uint8_t mask,
                            const uint8_t* levels, uint8_t* out) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR  // HWY_SCALAR lacks the operation
  const hn::FixedTag<uint8_t, 16> u8;
  const hn::FixedTag<uint16_t, 8> u16;
  const auto table = hn::LoadU(u8, levels), masks = hn::Set(u8, mask);
  for (; i + 16 <= count; i += 16) {
    // Bits of the byte beside it are masked away.
    const auto moved = hn::ShiftRightSame(hn::BitCast(u16, hn::LoadU(u8, codes + i)), shift);
    const auto indices = hn::And(hn::BitCast(u8, moved), masks);
    hn::StoreU(hn::TableLookupBytes(table, indices), u8, out + i);
  }
#endif
  for (; i < count; ++i) out[i] = levels[codes[i] >> shift & mask];
}

void decode_codes(int bits, const std::byte* codes, int64_t n, int64_t dim, int8_t* out) {
  HWY_ALIGN uint8_t levels[16] = {};
  const auto values = code_levels(bits);
  std::memcpy(levels, values.data(), values.size());
  const int64_t bytes = code_bytes(dim, bits);
  const auto mask = static_cast<uint8_t>((1 << bits) - 1);
  for (int64_t row = 0; row < n; ++row) {
    const auto* from = reinterpret_cast<const uint8_t*>(codes + row * bytes);
    auto* to = reinterpret_cast<uint8_t*>(out + row * dim);
    for (int64_t done = 0; done < dim; done += bytes) {
      const int shift = static_cast<int>(done / bytes) * bits;
      decode_part(from, std::min(bytes, dim - done), shift, mask, levels, to + done);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sqz
HWY_AFTER_NAMESPACE();
#endif
