// What the cases on a GPU share: a stream, CUDA graphs that are replayed, and the clock beside.
#pragma once

#include <functional>
#include <memory>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/gpu_clock.h"

namespace sqz::bench {

// A CUDA graph of a piece of work, and the time that a replay takes. The device is current in all
// calls.
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

struct DeviceBench {
  int gpu = 0;
  cuda::Stream stream;
  std::unique_ptr<GpuClock> clock;

  Status open(int device);  // which is current
};

// Replays the graph; the clock's readings meanwhile count for `place`.
Contender replayed(std::shared_ptr<DeviceBench> bench, const std::string& name, int place,
                   std::shared_ptr<DeviceGraph> graph);

// {gpu, cuda_driver, cuda_runtime}
JsonMembers describe_gpu(int gpu);

}  // namespace sqz::bench
