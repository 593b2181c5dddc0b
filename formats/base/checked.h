// Arithmetic on numbers that came from a file: overflow is a value to test, never a wrap.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace sqz {

template <std::integral T>
std::optional<T> checked_add(T a, T b) {
  T out;
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}

template <std::integral T>
std::optional<T> checked_mul(T a, T b) {
  T out;
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

// The number of elements of a shape; empty if a dimension is negative or the product overflows.
inline std::optional<int64_t> checked_elements(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(count, dim, &count)) return std::nullopt;
  }
  return count;
}

// `value` as To, or empty if To cannot hold it.
template <std::integral To, std::integral From>
std::optional<To> checked_cast(From value) {
  if (!std::in_range<To>(value)) return std::nullopt;
  return static_cast<To>(value);
}

}  // namespace sqz
