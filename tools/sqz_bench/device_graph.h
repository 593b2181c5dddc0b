// A CUDA graph of a piece of work, and the time that a replay takes.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "formats/base/status.h"

namespace sqz::bench {

// The device is current in all calls.
class DeviceGraph {
 public:
  DeviceGraph() = default;
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  // Once. `enqueue` puts work on the stream, which is run once before: kernels must be loaded.
  Status capture(cudaStream_t stream, const std::function<Status(cudaStream_t)>& enqueue);
  // Waits for the end.
  Status run(cudaStream_t stream);
  // Of the last run, by events on both sides of it.
  double seconds() const { return seconds_; }

 private:
  cudaGraphExec_t executable_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  double seconds_ = 0;
};

}  // namespace sqz::bench
