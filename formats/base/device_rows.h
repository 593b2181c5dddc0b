// Keys and values of one layer in the memory of a CUDA device: how a dense pass hands them to an
// index build without a trip through the host. A plain description; whoever made it owns the
// memory, which stays valid and unchanged for the call that it is passed to, and has finished
// writing it (the device was synchronised).
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
