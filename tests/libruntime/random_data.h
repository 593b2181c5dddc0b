// Random tensors in the stored dtypes, the same on every machine.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "formats/base/dtype.h"

namespace sqz::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  // std::normal_distribution is not the same in every standard library; this is.
  float normal() {
    float sum = 0;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(engine_() >> 40) * 0x1p-24f;
    return sum - 6.0f;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  std::vector<float> normals(int64_t count, float scale = 1.0f) {
    std::vector<float> out(count);
    for (float& x : out) x = scale * normal();
    return out;
  }

 private:
  std::mt19937_64 engine_;
};

// The bytes of `values` rounded to dtype (BF16, F16 or F32).
inline std::vector<std::byte> stored(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> out(values.size() * static_cast<size_t>(dtype_size(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(out.data() + 4 * i, &values[i], 4);
    } else {
      const uint16_t bits =
          dtype == DType::kBF16 ? to_bfloat16(values[i]).bits : to_float16(values[i]).bits;
      std::memcpy(out.data() + 2 * i, &bits, 2);
    }
  }
  return out;
}

}  // namespace sqz::testing
