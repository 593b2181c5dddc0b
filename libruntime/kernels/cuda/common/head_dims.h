// The head dimensions that there are kernels for, made constants.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "formats/base/status.h"

namespace sqz::cuda {

// f(std::integral_constant<int, dim>()); `otherwise` for a dim that there is no kernel for.
template <class T, class Function>
T for_dim(int dim, T otherwise, const Function& f) {
  switch (dim) {
    case 64:
      return f(std::integral_constant<int, 64>());
    case 96:
      return f(std::integral_constant<int, 96>());
    case 128:
      return f(std::integral_constant<int, 128>());
    case 256:
      return f(std::integral_constant<int, 256>());
    default:
      return otherwise;
  }
}

inline bool is_kernel_dim(int64_t dim) {
  return for_dim(static_cast<int>(std::min<int64_t>(dim, 1 << 16)), false,
                 [](auto) { return true; });
}

// The largest GQA group of kernels that hold it in the 8 upper rows of an mma.
inline constexpr int kMostGroup = 8;
inline Status check_group(int group) {
  if (group >= 1 && group <= kMostGroup) return {};
  return {Code::kUnsupported,
          concat("CUDA: found ", group, " query heads a KV head, expected 1 to ", kMostGroup)};
}

inline Status no_such_dim(int dim) {
  return {Code::kUnsupported,
          concat("CUDA: found head dimension ", dim, ", expected 64, 96, 128 or 256")};
}

}  // namespace sqz::cuda
