// The head dimensions that there are kernels for, made constants.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "formats/base/status.h"

namespace sqz::cuda {

template <int kDim>
using Dim = std::integral_constant<int, kDim>;

// f(Dim<dim>()) if `dim` is one of kDims, else `otherwise`.
template <int... kDims, class T, class Function>
T for_one_of(int64_t dim, T otherwise, const Function& f) {
  static_cast<void>(((dim == kDims ? (otherwise = f(Dim<kDims>()), true) : false) || ...));
  return otherwise;
}

// For the dimensions of all kernels.
template <class T, class Function>
T for_dim(int64_t dim, T otherwise, const Function& f) {
  return for_one_of<64, 96, 128, 256>(dim, otherwise, f);
}

// For these and those that the sm80 kernels have, too.
template <class T, class Function>
T for_sm80_dim(int64_t dim, T otherwise, const Function& f) {
  return for_one_of<64, 80, 96, 128, 160, 192, 256, 512>(dim, otherwise, f);
}

// f(Dim<dim>(), Dim<values>()) for the dimensions of keys and of values that the sm80 attention
// has.
template <class T, class Function>
T for_dims(int64_t dim, int64_t values, T otherwise, const Function& f) {
  if (dim == 192 && values == 128) return f(Dim<192>(), Dim<128>());
  if (dim != values) return otherwise;
  return for_sm80_dim(dim, otherwise, [&](auto both) { return f(both, both); });
}

inline bool is_kernel_dim(int64_t dim) {
  return for_dim(dim, false, [](auto) { return true; });
}
inline bool are_kernel_dims(int64_t dim, int64_t values) {
  return for_dims(dim, values, false, [](auto, auto) { return true; });
}

inline constexpr int64_t kMostPageDim = 256;  // of keys that are looked up by pages

// The largest GQA group of kernels that hold it in the 16 rows of an mma.
inline constexpr int kMostGroup = 16;
inline Status check_group(int group) {
  if (group >= 1 && group <= kMostGroup) return {};
  return {Code::kUnsupported,
          concat("CUDA: found ", group, " query heads a KV head, expected 1 to ", kMostGroup)};
}

inline Status no_such_dim(int64_t dim) {
  return {Code::kUnsupported,
          concat("CUDA: found head dimension ", dim, ", expected 64, 96, 128 or 256")};
}
inline Status no_such_dims(int64_t dim, int64_t values) {
  return {Code::kUnsupported,
          concat("CUDA: found keys of ", dim, " and values of ", values,
                 " dimensions, expected both of 64, 80, 96, 128, 160, 192, 256 or 512, or keys of "
                 "192 and values of 128")};
}

}  // namespace sqz::cuda
