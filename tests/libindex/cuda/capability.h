// The GPU that the CUDA tests run on.
#pragma once

#include <cstdlib>

#include "libruntime/cuda/device.h"

namespace sqz::cuda {

// SQZ_TEST_CAPABILITY=86: every test serves as from a GPU of compute capability 8.6.
int32_t pretended_capability() {  // weak, as it is declared
  const char* capability = std::getenv("SQZ_TEST_CAPABILITY");
  return capability == nullptr ? 0 : std::atoi(capability);
}

}  // namespace sqz::cuda

namespace sqz::cuda::test {

inline bool have_hopper() {
  const auto device = read_device(0);
  return device.ok() && device->has_wgmma();
}

}  // namespace sqz::cuda::test
