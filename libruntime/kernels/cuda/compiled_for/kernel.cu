#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/compiled_for/kernel.h"

namespace sqz::cuda {
namespace {

// Compiled as all kernels but those for one GPU generation are.
__global__ void probe_kernel() {}

}  // namespace

Result<int32_t> compiled_for(int32_t capability) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion) {
    forget(error);
    return Status(Code::kUnsupported,
                  concat("the GPU has compute capability ", capability / 10, ".", capability % 10,
                         ", for which this sqz has no kernels; expected one built with it in "
                         "SQZ_CUDA_ARCHITECTURES, or a newer driver"));
  }
  SQZ_RETURN_IF_ERROR(cuda_status(error, "cudaFuncGetAttributes"));
  return attributes.ptxVersion;
}

}  // namespace sqz::cuda
