// sqz_tensor, checked.
#pragma once

#include <initializer_list>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "sqz/sqz.h"

namespace sqz::capi {

struct TensorView {
  void* data = nullptr;  // byte_offset included; may be null only if a dimension is 0
  DType dtype = DType::kF32;
  int64_t first_dim = 0;
  int64_t bytes = 0;
};

// A contiguous CPU tensor of F32, F16 or BF16 with `shape`, where -1 stands for any size. `name`
// opens messages.
Result<TensorView> check_tensor(const sqz_tensor* tensor, const char* name,
                                std::initializer_list<int64_t> shape);

// kInvalidArgument if two tensors share memory.
Status check_disjoint(const TensorView& a, const char* name_a, const TensorView& b,
                      const char* name_b);

}  // namespace sqz::capi
