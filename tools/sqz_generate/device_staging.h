// Queries and results of calls that come from the host and are served by a GPU.
#pragma once

#include <cstddef>
#include <memory>

#include "formats/base/status.h"

namespace sqz {

class DeviceStaging {
 public:
  // kUnsupported in a build without CUDA.
  static Result<std::unique_ptr<DeviceStaging>> create(int device);
  virtual ~DeviceStaging() = default;

  // Room for a call with this many floats of q and of lse; q is copied there.
  virtual Status load(const float* q, size_t q_floats, size_t lse_floats) = 0;
  // Waits for the call, then copies what it left.
  virtual Status store(float* out, float* lse) = 0;

  float* q = nullptr;  // device memory, valid until the next load()
  float* out = nullptr;
  float* lse = nullptr;
};

}  // namespace sqz
