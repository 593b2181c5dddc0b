// CUDA error codes as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "formats/base/status.h"

namespace sqz::cuda {

// CUDA keeps an error for the next cudaGetLastError(): here it is taken away, or the next launch on
// this thread, ours or the host's, would be blamed for it.
inline void forget(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
}

// `what` is a name or the text of a call, of which the name is taken.
inline Status cuda_status(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return {};
  forget(error);
  const Code code = error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kInternal;
  return {code, concat(what.substr(0, what.find('(')), ": ", cudaGetErrorString(error))};
}

// The status of something that a session on a GPU does not do.
inline Status unsupported_on_gpu(const char* what, const char* expected) {
  return {Code::kUnsupported, concat("device_type 2 (CUDA): ", what, "; expected ", expected)};
}

}  // namespace sqz::cuda

#define SQZ_RETURN_IF_CUDA_ERROR(call) SQZ_RETURN_IF_ERROR(::sqz::cuda::cuda_status((call), #call))
