#include "tools/sqz_bench/device_graph.h"

#include "libruntime/cuda/cuda_status.h"

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

}  // namespace sqz::bench
