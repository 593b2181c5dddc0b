// Keys and values of one layer in the memory of a CUDA device: how a dense pass hands them to an
// index build without a trip through the host. The caller owns the memory. It has been written (the
// device was synchronised), and it stays valid and unchanged for the call.
#pragma once

#include <cstdint>

#include "formats/base/dtype.h"

namespace sqz {

struct DeviceRows {
  const void* keys = nullptr;    // [Hkv, N, d] on the device, after RoPE
  const void* values = nullptr;  // [Hkv, N, d]
  DType dtype = DType::kBF16;    // BF16, F16 or F32, of both
  int64_t head_stride = 0;       // elements from one head to the next, N d or more, of both
  int device = 0;                // number of the CUDA device
};

}  // namespace sqz
