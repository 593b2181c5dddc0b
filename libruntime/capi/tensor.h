// Checks of sqz_tensor.
#pragma once

#include <initializer_list>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "formats/sqz_file.h"
#include "libruntime/attention/lse_rows.h"
#include "sqz/sqz.h"

namespace sqz::capi {

struct TensorView {
  void* data = nullptr;  // byte_offset included; may be null only if a dimension is 0
  DType dtype = DType::kF32;
  int64_t first_dim = 0;
  int64_t bytes = 0;  // from the first element to behind the last
};

// A contiguous tensor of F32, F16 or BF16 with `shape`, where -1 stands for any size, on CUDA
// device `device` or, if that is -1, on the CPU. `name` opens messages.
Result<TensorView> check_tensor(const sqz_tensor* tensor, const char* name,
                                std::initializer_list<int64_t> shape, int device = -1);

// A contiguous tensor of any type and shape on the CPU.
Result<StateTensor> check_state(const sqz_tensor* tensor, const char* name);
// DLPack's code of a type, as in sqz_tensor.
uint8_t dtype_code(DType dtype);

// A float32 tensor [tokens, heads] with any strides that keep its elements apart.
struct LseView {
  TensorView tensor;
  LseRows rows;
};
Result<LseView> check_lse(const sqz_tensor* tensor, const char* name, int64_t tokens, int64_t heads,
                          int device = -1);

// kInvalidArgument if two tensors share memory.
Status check_disjoint(const TensorView& a, const char* name_a, const TensorView& b,
                      const char* name_b);

}  // namespace sqz::capi
