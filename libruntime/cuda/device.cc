#include "libruntime/cuda/device.h"

#include <cuda.h>

#include <algorithm>
#include <atomic>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/driver.h"
#include "libruntime/kernels/cuda/compiled_for/kernel.h"

namespace sqz::cuda {
namespace {

// Bytes of shared memory that a block may have, by compute capability.
int32_t block_shared_of(int32_t capability) {
  if (capability == 80 || capability == 87) return 163 << 10;
  const bool large = capability >= 90 && capability < 120;
  return large ? 227 << 10 : static_cast<int32_t>(kLeastBlockShared);
}

// The driver's functions that the runtime does not have.
struct Driver {
  decltype(&cuDevicePrimaryCtxRetain) retain = nullptr;
  decltype(&cuCtxPushCurrent) push = nullptr;
  decltype(&cuCtxPopCurrent) pop = nullptr;
  bool found = find_driver_function("cuDevicePrimaryCtxRetain", retain).ok() &&
               find_driver_function("cuCtxPushCurrent", push).ok() &&
               find_driver_function("cuCtxPopCurrent", pop).ok();
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// Null if there is none. It is retained once for each GPU and never released: contexts end with the
// process.
CUcontext primary_context(int gpu) {
  constexpr int kMostGpus = 64;
  static std::atomic<CUcontext> contexts[kMostGpus] = {};
  if (gpu < 0 || gpu >= kMostGpus || !driver().found) return nullptr;
  CUcontext context = contexts[gpu].load();
  if (context == nullptr && driver().retain(&context, gpu) == CUDA_SUCCESS) {
    contexts[gpu] = context;
  }
  return context;
}

std::string version_text(int version) {
  return concat(version / 1000, ".", version % 1000 / 10);
}

}  // namespace

DeviceProbe probe_device(int gpu) {
  DeviceProbe probe;
  cudaDriverGetVersion(&probe.driver_version);
  cudaRuntimeGetVersion(&probe.runtime_version);
  probe.error = cudaGetDeviceCount(&probe.count);
  forget(probe.error);
  if (probe.error != cudaSuccess || gpu < 0 || gpu >= probe.count) return probe;
  cudaDeviceProp properties;
  probe.call = "cudaGetDeviceProperties";
  probe.error = cudaGetDeviceProperties(&properties, gpu);
  forget(probe.error);
  if (probe.error != cudaSuccess) return probe;
  probe.major = properties.major;
  probe.minor = properties.minor;
  probe.name = properties.name;
  return probe;
}

Status check_probe(const DeviceProbe& probe, int gpu) {
  const auto unsupported = [](const std::string& why) { return Status(Code::kUnsupported, why); };
  if (probe.driver_version == 0) return unsupported("there is no NVIDIA driver on this machine");
  if (probe.error == cudaErrorInsufficientDriver) {
    return unsupported(concat("the NVIDIA driver is too old: it has CUDA ",
                              version_text(probe.driver_version), ", this sqz was built with ",
                              version_text(probe.runtime_version)));
  }
  if (probe.error == cudaErrorNoDevice || (probe.error == cudaSuccess && probe.count == 0)) {
    return unsupported("there is no NVIDIA GPU on this machine");
  }
  if (probe.error != cudaSuccess) {
    return unsupported(
        concat("the GPU cannot be used: ", probe.call, ": ", cudaGetErrorString(probe.error)));
  }
  if (gpu < 0 || gpu >= probe.count) {
    return unsupported(concat("there is no CUDA device ", gpu, "; found ", probe.count));
  }
  if (probe.major < 8) {
    return unsupported(concat(probe.name, " has compute capability ", probe.major, ".", probe.minor,
                              ", 8.0 or newer is needed"));
  }
  return {};
}

Result<Device> read_device(int gpu) {
  const CurrentDevice current(gpu);
  const auto attribute = [gpu](cudaDeviceAttr what, int32_t& value) {
    return cuda_status(cudaDeviceGetAttribute(&value, what, gpu), "cudaDeviceGetAttribute");
  };
  Device device;
  int32_t minor = 0;
  SQZ_RETURN_IF_ERROR(attribute(cudaDevAttrComputeCapabilityMajor, device.capability));
  SQZ_RETURN_IF_ERROR(attribute(cudaDevAttrComputeCapabilityMinor, minor));
  SQZ_RETURN_IF_ERROR(attribute(cudaDevAttrMultiProcessorCount, device.multiprocessors));
  SQZ_RETURN_IF_ERROR(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.block_shared));
  device.capability = device.capability * 10 + minor;
  if (pretended_capability != nullptr && pretended_capability() != 0) {
    device.capability = pretended_capability();
    device.block_shared = std::min(device.block_shared, block_shared_of(device.capability));
  }
  SQZ_ASSIGN_OR_RETURN(const int32_t compiled, compiled_for(device.capability));
  device.compiled = std::min(device.capability, compiled);
  return device;
}

CurrentDevice::CurrentDevice(int gpu) {
  const CUcontext context = primary_context(gpu);
  pushed_ = context != nullptr && driver().push(context) == CUDA_SUCCESS;
  if (!pushed_) {
    forget(cudaGetDevice(&before_));
    forget(cudaSetDevice(gpu));
  }
  forget(cudaThreadExchangeStreamCaptureMode(&mode_));
}

CurrentDevice::~CurrentDevice() {
  forget(cudaThreadExchangeStreamCaptureMode(&mode_));
  CUcontext popped = nullptr;
  if (pushed_) {
    driver().pop(&popped);
  } else {
    forget(cudaSetDevice(before_));
  }
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  const CurrentDevice current(gpu_);
  forget(cudaFree(data_));
}

Status DeviceMemory::reserve(size_t bytes) {
  if (bytes <= bytes_) return {};
  SQZ_RETURN_IF_CUDA_ERROR(cudaGetDevice(&gpu_));
  forget(cudaFree(data_));
  data_ = nullptr;
  bytes_ = 0;
  SQZ_RETURN_IF_CUDA_ERROR(cudaMalloc(&data_, bytes));
  bytes_ = bytes;
  return {};
}

Result<size_t> DeviceMemory::available() const {
  size_t free = 0, total = 0;
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free, &total));
  const size_t spared = std::min<size_t>(size_t{256} << 20, total / 16);
  return bytes_ + (free > spared ? free - spared : 0);
}

Status zero_memory(void* data, size_t bytes) {
  if (bytes == 0) return {};
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(data, 0, bytes, cudaStreamPerThread));
  return cuda_status(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
}

Status copy_memory(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return {};
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cudaStreamPerThread));
  return cuda_status(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
}

Stream::~Stream() {
  if (stream_ == nullptr) return;
  const CurrentDevice current(gpu_);
  forget(cudaStreamDestroy(stream_));
}

Status Stream::create() {
  SQZ_RETURN_IF_CUDA_ERROR(cudaGetDevice(&gpu_));
  SQZ_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  return {};
}

}  // namespace sqz::cuda
