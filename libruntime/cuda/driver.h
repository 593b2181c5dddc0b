// Functions of the CUDA driver, which is not linked: the library must load on machines without one.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "formats/base/status.h"

namespace sqz::cuda {

namespace detail {
// kUnsupported if the driver has no such function.
Status find_driver_function(const char* name, void** function);
}  // namespace detail

// decltype(&cuFunction) of the driver's "cuFunction".
template <class Function>
Status find_driver_function(const char* name, Function& function) {
  void* found = nullptr;
  SQZ_RETURN_IF_ERROR(detail::find_driver_function(name, &found));
  function = reinterpret_cast<Function>(found);
  return {};
}

// A tensor map: how the copy engine finds boxes of 16-bit elements in global memory. Arrays as in
// cuTensorMapEncodeTiled; rows of a box have `row_bytes` (64 or 128), over which it is swizzled.
Status encode_tensor_map(CUtensorMap& map, const void* data, uint32_t rank, const uint64_t* sizes,
                         const uint64_t* strides, const uint32_t* box, uint32_t row_bytes);
// A map of `data` [heads, rows, dim] in boxes of box_rows rows and row_bytes bytes of each.
Status encode_rows(CUtensorMap& map, const void* data, int64_t heads, int64_t rows, int64_t dim,
                   uint32_t box_rows, uint32_t row_bytes);

}  // namespace sqz::cuda
