// Which GPU the CUDA tests run on.
#pragma once

#include <cstdlib>

#include "libruntime/cuda/device.h"

namespace sqz::cuda::test {

// SQZ_TEST_CAPABILITY=86: every test serves as from a GPU of compute capability 8.6.
inline const bool pretends = [] {
  const char* capability = std::getenv("SQZ_TEST_CAPABILITY");
  if (capability != nullptr) pretend_capability(std::atoi(capability));
  return capability != nullptr;
}();

inline bool have_hopper() {
  const auto device = read_device(0);
  return device.ok() && device->has_wgmma();
}

}  // namespace sqz::cuda::test
