#include "formats/base/dtype.h"

#include <algorithm>
#include <array>

namespace sqz {
namespace {

struct Entry {
  DType dtype;
  std::string_view name;
  int64_t size;
};

constexpr std::array<Entry, 13> kEntries = {{
    {DType::kBool, "BOOL", 1},
    {DType::kU8, "U8", 1},
    {DType::kI8, "I8", 1},
    {DType::kU16, "U16", 2},
    {DType::kI16, "I16", 2},
    {DType::kF16, "F16", 2},
    {DType::kBF16, "BF16", 2},
    {DType::kU32, "U32", 4},
    {DType::kI32, "I32", 4},
    {DType::kF32, "F32", 4},
    {DType::kU64, "U64", 8},
    {DType::kI64, "I64", 8},
    {DType::kF64, "F64", 8},
}};

constexpr bool in_enum_order() {
  for (size_t i = 0; i < kEntries.size(); ++i) {
    if (kEntries[i].dtype != static_cast<DType>(i)) return false;
  }
  return true;
}
static_assert(in_enum_order());

}  // namespace

int64_t dtype_size(DType dtype) {
  return kEntries[static_cast<size_t>(dtype)].size;
}

std::string_view dtype_name(DType dtype) {
  return kEntries[static_cast<size_t>(dtype)].name;
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const Entry& entry : kEntries) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

Float16 to_float16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};   // NaN
  if (magnitude >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // >= 2^16
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal. Adding 0.5 lets the FPU round.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t round = 0xfffu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | ((magnitude + round - 0x38000000u) >> 13))};
}

void to_floats(const void* stored, DType dtype, int64_t count, float* out) {
  const auto convert = [&]<class T>(const T* from) {
    std::transform(from, from + count, out, [](T x) { return to_float(x); });
  };
  if (dtype == DType::kBF16) return convert(static_cast<const BFloat16*>(stored));
  if (dtype == DType::kF16) return convert(static_cast<const Float16*>(stored));
  convert(static_cast<const float*>(stored));
}

}  // namespace sqz
