#include "libruntime/attention/state.h"

#include <algorithm>
#include <cmath>

namespace sqz {
namespace {

// f(T*) with T the element type.
template <class Function>
auto with_elements(DType dtype, const Function& f) {
  switch (dtype) {
    case DType::kBF16:
      return f(static_cast<BFloat16*>(nullptr));
    case DType::kF16:
      return f(static_cast<Float16*>(nullptr));
    default:
      return f(static_cast<float*>(nullptr));
  }
}

void store(float x, float& out) {
  out = x;
}
void store(float x, Float16& out) {
  out = to_float16(x);
}
void store(float x, BFloat16& out) {
  out = to_bfloat16(x);
}

}  // namespace

void add_partial(const PartialRows& into, const PartialRows& part, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r) {
    const float maximum = std::max(into.maximum[r], part.maximum[r]);
    const float old = std::exp(into.maximum[r] - maximum);
    const float fresh = std::exp(part.maximum[r] - maximum);
    into.maximum[r] = maximum;
    into.sum[r] = into.sum[r] * old + part.sum[r] * fresh;
    float* to = into.values + r * dim;
    const float* from = part.values + r * dim;
    for (int64_t c = 0; c < dim; ++c) to[c] = to[c] * old + from[c] * fresh;
  }
}

bool finish_row(const PartialRows& state, int64_t row, int64_t dim, DType dtype, void* out,
                float* lse) {
  const float sum = state.sum[row];
  const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
  *lse = sum == 0 ? kMinusInfinity : state.maximum[row] + std::log(sum);
  const float* values = state.values + row * dim;
  with_elements(dtype, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(out);
    for (int64_t c = 0; c < dim; ++c) store(values[c] * inverse, to[c]);
  });
  return sum == 0 || std::isfinite(*lse);
}

bool to_finite_floats(DType dtype, const void* in, int64_t count, float* out) {
  return with_elements(dtype, [&](auto* type) {
    const auto* from = static_cast<const std::remove_pointer_t<decltype(type)>*>(in);
    uint32_t bad = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float x = to_float(from[i]);
      bad |= (std::bit_cast<uint32_t>(x) & 0x7fffffffu) >= 0x7f800000u ? 1u : 0u;
      if (out != nullptr) out[i] = x;
    }
    return bad == 0;
  });
}

bool merge_rows(DType dtype, int64_t rows, int64_t dim, void* out_a, const LseRows& lse_a,
                const void* out_b, const ConstLseRows& lse_b) {
  return with_elements(dtype, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    auto* a = static_cast<Element*>(out_a);
    const auto* b = static_cast<const Element*>(out_b);
    for (int64_t r = 0; r < rows; ++r) {
      const float maximum = std::max(lse_a[r], lse_b[r]);
      if (std::isnan(lse_a[r]) || std::isnan(lse_b[r]) || maximum == -kMinusInfinity) return false;
      if (lse_b[r] == kMinusInfinity) continue;
      const float weight_a = std::exp(lse_a[r] - maximum);
      const float weight_b = std::exp(lse_b[r] - maximum);
      const float sum = weight_a + weight_b;
      for (int64_t i = r * dim; i < (r + 1) * dim; ++i) {
        // An empty side may hold anything: its 0 * NaN must not count.
        const float from_a = weight_a == 0 ? 0.0f : weight_a * to_float(a[i]);
        store((from_a + weight_b * to_float(b[i])) / sum, a[i]);
      }
      lse_a[r] = maximum + std::log(sum);
    }
    return true;
  });
}

}  // namespace sqz
