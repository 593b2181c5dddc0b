#include "libruntime/cuda/device.h"

#include <algorithm>

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

std::string version_text(int version) {
  return concat(version / 1000, ".", version % 1000 / 10);
}

}  // namespace

DeviceProbe probe_device(int gpu) {
  DeviceProbe probe;
  cudaDriverGetVersion(&probe.driver_version);
  cudaRuntimeGetVersion(&probe.runtime_version);
  probe.error = cudaGetDeviceCount(&probe.count);
  cudaGetLastError();  // nobody else's
  if (probe.error != cudaSuccess || gpu < 0 || gpu >= probe.count) return probe;
  cudaDeviceProp properties;
  probe.error = cudaGetDeviceProperties(&properties, gpu);
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
    return unsupported(concat("the GPU cannot be used: ", cudaGetErrorString(probe.error)));
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

Status DeviceMemory::reserve(size_t bytes) {
  if (bytes <= bytes_) return {};
  cudaFree(data_);
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

Status Stream::create() {
  return cuda_status(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                     "creating a stream");
}

}  // namespace sqz::cuda
