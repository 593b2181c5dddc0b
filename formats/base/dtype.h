// Element types that tensors of our files may have, and the two 16-bit floats on the host.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

namespace sqz {

enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64
};

// Bytes of one element.
int64_t dtype_size(DType dtype);
// The name that safetensors uses: "BF16", "F32", "U32", ...
std::string_view dtype_name(DType dtype);
std::optional<DType> dtype_from_name(std::string_view name);

// bfloat16 bits. Conversion from float rounds to nearest even and keeps NaN a NaN.
struct BFloat16 {
  uint16_t bits = 0;
};
// IEEE binary16 bits. Conversion from float rounds to nearest even; overflow becomes infinity.
struct Float16 {
  uint16_t bits = 0;
};

inline float to_float(float x) {
  return x;
}
inline float to_float(BFloat16 x) {
  return std::bit_cast<float>(uint32_t{x.bits} << 16);
}

inline float to_float(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t wide = exponent == 0x1f ? 0xffu : exponent + 112u;  // 127 - 15 = 112
  return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

inline BFloat16 to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  const uint32_t round = 0x7fffu + (bits >> 16 & 1u);
  return {static_cast<uint16_t>((bits + round) >> 16)};
}

Float16 to_float16(float x);

// `count` numbers stored as BF16, F16 or F32, in float32.
void to_floats(const void* stored, DType dtype, int64_t count, float* out);

}  // namespace sqz
