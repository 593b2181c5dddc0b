// CUDA error codes as Status.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/status.h"

namespace sqz::cuda {

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  const Code code = error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kInternal;
  return {code, concat(what, ": ", cudaGetErrorString(error))};
}

// What a session on a GPU does not do.
inline Status unsupported_on_gpu(const char* what, const char* expected) {
  return {Code::kUnsupported, concat("device_type 2 (CUDA): ", what, "; expected ", expected)};
}

}  // namespace sqz::cuda

#define SQZ_RETURN_IF_CUDA_ERROR(call) SQZ_RETURN_IF_ERROR(::sqz::cuda::cuda_status((call), #call))
