// Tells which kernels of this program the current device runs.
#pragma once

#include <cstdint>

#include "formats/base/status.h"

namespace sqz::cuda {

// The compute capability that they were compiled for (80 is 8.0), in machine code or in PTX that
// the driver compiled. kUnsupported if there are none; `capability` is the device's.
Result<int32_t> compiled_for(int32_t capability);

}  // namespace sqz::cuda
