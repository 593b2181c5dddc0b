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

  // Room for a call with this many bytes of q and floats of lse; q is copied there.
  virtual Status load(const void* q, size_t q_bytes, size_t lse_floats) = 0;
  // Waits for the call, then copies what it left.
  virtual Status store(void* out, float* lse) = 0;

  void* q = nullptr;  // device memory, valid until the next load()
  void* out = nullptr;
  void* lse = nullptr;
};

}  // namespace sqz
