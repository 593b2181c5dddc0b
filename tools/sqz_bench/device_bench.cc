#include "tools/sqz_bench/device_bench.h"

#include <string>

namespace sqz::bench {

DeviceGraph::~DeviceGraph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
}

Status DeviceGraph::capture(cudaStream_t stream,
                            const std::function<Status(cudaStream_t)>& enqueue) {
  SQZ_RETURN_IF_CUDA_ERROR(cudaEventCreate(&begin_));
  SQZ_RETURN_IF_CUDA_ERROR(cudaEventCreate(&end_));
  SQZ_RETURN_IF_ERROR(enqueue(stream));
  SQZ_RETURN_IF_ERROR(cuda::cuda_status(cudaStreamSynchronize(stream), "the first run"));
  SQZ_RETURN_IF_CUDA_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const Status status = enqueue(stream);
  cudaGraph_t graph = nullptr;
  SQZ_RETURN_IF_CUDA_ERROR(cudaStreamEndCapture(stream, &graph));
  const cudaError_t error = cudaGraphInstantiate(&executable_, graph, 0);
  cudaGraphDestroy(graph);
  SQZ_RETURN_IF_ERROR(status);
  return cuda::cuda_status(error, "making a graph");
}

Status DeviceGraph::run(cudaStream_t stream) {
  SQZ_RETURN_IF_CUDA_ERROR(cudaEventRecord(begin_, stream));
  SQZ_RETURN_IF_CUDA_ERROR(cudaGraphLaunch(executable_, stream));
  SQZ_RETURN_IF_CUDA_ERROR(cudaEventRecord(end_, stream));
  SQZ_RETURN_IF_ERROR(cuda::cuda_status(cudaStreamSynchronize(stream), "a replay"));
  float milliseconds = 0;
  SQZ_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, begin_, end_));
  seconds_ = 1e-3 * static_cast<double>(milliseconds);
  return {};
}

Status DeviceBench::open(int device) {
  gpu = device;
  SQZ_RETURN_IF_ERROR(stream.create());
  char bus_id[64] = "";
  SQZ_RETURN_IF_CUDA_ERROR(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), gpu));
  clock = std::make_unique<GpuClock>(bus_id);
  return {};
}

Contender replayed(std::shared_ptr<DeviceBench> bench, const std::string& name, int place,
                   std::shared_ptr<DeviceGraph> graph) {
  const auto run = [bench, graph, place](int64_t) {
    const cuda::CurrentDevice current(bench->gpu);
    bench->clock->watch(place);
    const Status status = graph->run(bench->stream.get());
    bench->clock->watch(-1);
    return status;
  };
  return {.name = name, .run = run};
}

JsonMembers describe_gpu(int gpu) {
  const cuda::DeviceProbe probe = cuda::probe_device(gpu);
  return {{"gpu", probe.name},
          {"cuda_driver", probe.driver_version},
          {"cuda_runtime", probe.runtime_version}};
}

Status check_device(const Options& options) {
  if (!options.compute_capability.empty()) {
    cuda::pretend_capability(static_cast<int32_t>(10 * std::stod(options.compute_capability) + .5));
  }
  const Status status = cuda::check_probe(cuda::probe_device(options.gpu), options.gpu);
  return status.ok() ? status : Status(Code::kInvalidArgument, "--device: " + status.message());
}

}  // namespace sqz::bench
