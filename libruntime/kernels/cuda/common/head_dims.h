// The head dimensions that there are kernels for, made constants.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "formats/base/status.h"

namespace sqz::cuda {

template <int kDim>
using Dim = std::integral_constant<int, kDim>;

// f(Dim<dim>()) for the dimensions of all kernels; `otherwise` for others.
template <class T, class Function>
T for_dim(int64_t dim, T otherwise, const Function& f) {
  switch (dim) {
    case 64:
      return f(Dim<64>());
    case 96:
      return f(Dim<96>());
    case 128:
      return f(Dim<128>());
    case 256:
      return f(Dim<256>());
    default:
      return otherwise;
  }
}

// The same for the dimensions that the sm80 kernels have, too.
template <class T, class Function>
T for_sm80_dim(int64_t dim, T otherwise, const Function& f) {
  switch (dim) {
    case 80:
      return f(Dim<80>());
    case 160:
      return f(Dim<160>());
    case 192:
      return f(Dim<192>());
    case 512:
      return f(Dim<512>());
    default:
      return for_dim(dim, otherwise, f);
  }
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
