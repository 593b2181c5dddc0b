// A CUDA device: whether there is one that can be used, its memory, its streams.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/status.h"

namespace sqz::cuda {

// The CUDA runtime's answers about a machine. Versions are CUDA's: 13000 is 13.0; a driver of
// version 0 is none.
struct DeviceProbe {
  cudaError_t error = cudaSuccess;
  int count = 0;
  int driver_version = 0, runtime_version = 0;
  int major = 0, minor = 0;                 // compute capability of the device asked for
  std::string name;                         // of it
  const char* call = "cudaGetDeviceCount";  // which `error` is of
};

DeviceProbe probe_device(int gpu);

// kUnsupported says why device `gpu` cannot be used: no driver or GPU, driver too old for the CUDA
// that this program was built with, no such device, compute capability below 8.0.
Status check_probe(const DeviceProbe& probe, int gpu);

// The least shared memory a block may have on GPUs from compute capability 8.0: kernels of a fixed
// size need no more.
inline constexpr size_t kLeastBlockShared = size_t{99} << 10;

// Properties of a GPU that decide how kernels are launched. Plain numbers: kernels get them with
// their parameters.
struct Device {
  int32_t capability = 0;  // compute capability: 80 is 8.0
  int32_t compiled = 0;    // the one that the kernels which run here were compiled for; not greater
  int32_t multiprocessors = 0;
  int32_t block_shared = 0;  // bytes of shared memory that a block may have

  // Thread block clusters, shared memory of other blocks, programmatic launches.
  bool has_clusters() const { return compiled >= 90; }
  // The instructions of 9.0 alone (wgmma): what sm90a kernels need.
  bool has_wgmma() const { return capability == 90 && compiled == 90; }
};

// kUnsupported if this program has no kernels for the GPU. `gpu` is one that check_probe() accepts.
Result<Device> read_device(int gpu);

// A program that is linked with this library may define this function: read_device() then finds a
// GPU of the compute capability that it returns, with the shared memory of one. 0 means the real
// one. Tests and benchmarks use it to serve from a large GPU as from a smaller one. The library
// itself does not define it.
__attribute__((weak)) int32_t pretended_capability();

// Makes a device current for a scope: its primary context, which CUDA's runtime and PyTorch use.
// The thread has the context that it had before, or none, afterwards. Within the scope the thread
// may allocate and wait although another thread captures a graph (relaxed capture mode).
class CurrentDevice {
 public:
  explicit CurrentDevice(int gpu);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool pushed_ = false;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// One block of device memory that grows and is kept between uses.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return data_; }
  // Contents are lost where it grows.
  Status reserve(size_t bytes);
  // Bytes that reserve() can get now, with a reserve left for the driver and others.
  Result<size_t> available() const;

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  int gpu_ = 0;
};

// Hands out aligned parts of a block one after another; from null it only counts.
class Layout {
 public:
  explicit Layout(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  T* take(int64_t count) {
    const uintptr_t part = base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(part);
  }
  size_t used() const { return used_; }

 private:
  uintptr_t base_;
  size_t used_ = 0;
};

// Both work on the thread's own stream and wait for it: other streams go on, and may be captured.
Status zero_memory(void* data, size_t bytes);
// Between device and host memory, either way.
Status copy_memory(void* to, const void* from, size_t bytes);
template <class T>
Status write_device(T* to, const std::vector<T>& from) {
  return copy_memory(to, from.data(), from.size() * sizeof(T));
}
// As many as `to` has.
template <class T>
Status read_back(const T* from, std::vector<T>& to) {
  return copy_memory(to.data(), from, to.size() * sizeof(T));
}

// Reserves `memory` for lay_out(), which lays everything out from an address on and returns the
// bytes (from null it only counts), and zeroes it.
template <class LayOut>
Status take_memory(DeviceMemory& memory, const LayOut& lay_out) {
  const size_t bytes = lay_out(nullptr);
  SQZ_RETURN_IF_ERROR(memory.reserve(bytes));
  lay_out(memory.data());
  return zero_memory(memory.data(), bytes);
}

// The same for as many of what the layout grows with, 1 to `most`, as can be added to the first in
// `bytes`: `count` tells lay_out() how many.
template <class LayOut>
Status take_chunk(DeviceMemory& memory, int64_t bytes, int64_t most, int64_t& count,
                  const LayOut& lay_out) {
  const auto bytes_of = [&](int64_t some) {
    count = some;
    return static_cast<int64_t>(lay_out(nullptr));
  };
  const int64_t room = bytes_of(1) + bytes;
  int64_t low = 1;
  for (int64_t high = most; low < high;) {
    const int64_t middle = high - (high - low) / 2;
    if (bytes_of(middle) <= room) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  count = low;
  return take_memory(memory, lay_out);
}

class Stream {
 public:
  Stream() = default;
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Status create();
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  int gpu_ = 0;
};

}  // namespace sqz::cuda
