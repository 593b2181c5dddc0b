#include <cuda_runtime_api.h>

#include <stdexcept>

#include "libruntime/cuda/device.h"
#include "tools/sqz_bench/device.h"

namespace sqz {

namespace {
int32_t pretended = 0;  // --compute-capability
}  // namespace

int32_t cuda::pretended_capability() {
  return pretended;
}

}  // namespace sqz

namespace sqz::bench {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(concat(what, ": ", cudaGetErrorString(error)));
}

// A graph of calls, and events on both sides of a replay.
class Graph {
 public:
  Graph(cudaStream_t stream, int64_t calls, const std::function<void(int64_t)>& call)
      : stream_(stream) {
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int64_t i = 0; i < calls; ++i) call(i);
    check(cudaStreamEndCapture(stream, &graph), "capture");
    const cudaError_t error = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "cudaGraphInstantiate");
  }
  ~Graph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (begin_ != nullptr) cudaEventDestroy(begin_);
    if (end_ != nullptr) cudaEventDestroy(end_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Seconds of one replay.
  double run() const {
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    check(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
    check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check(cudaStreamSynchronize(stream_), "a replay");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

class Gpu final : public Device {
 public:
  explicit Gpu(int number) : number_(number) {
    check(cudaSetDevice(number), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Gpu() override { cudaStreamDestroy(stream_); }

  int number() const override { return number_; }
  void* stream() const override { return stream_; }
  std::shared_ptr<void> copy(std::span<const std::byte> bytes) const override {
    void* data = nullptr;
    check(cudaMalloc(&data, bytes.size()), "cudaMalloc");
    std::shared_ptr<void> out(data, [](void* memory) { cudaFree(memory); });
    check(cudaMemcpy(data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
    return out;
  }
  void time(benchmark::State& state, int64_t graph_calls, const std::function<void(int64_t)>& call,
            const std::function<void()>& warm) const override {
    call(0);  // loads the kernels
    check(cudaStreamSynchronize(stream_), "the first call");
    const Graph graph(stream_, graph_calls, call);
    graph.run();
    warm();
    for (auto _ : state) state.SetIterationTime(graph.run() / static_cast<double>(graph_calls));
  }

 private:
  int number_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<Device>> make_gpu(int number, const std::string& capability) {
  if (!capability.empty()) {
    pretended = static_cast<int32_t>(10 * std::stod(capability) + .5);
  }
  const cuda::DeviceProbe probe = cuda::probe_device(number);
  const Status status = cuda::check_probe(probe, number);
  if (!status.ok()) return Status(Code::kInvalidArgument, "--device: " + status.message());
  benchmark::AddCustomContext("gpu", probe.name);
  benchmark::AddCustomContext("cuda_driver", concat(probe.driver_version));
  return std::unique_ptr<Device>(new Gpu(number));
}

}  // namespace sqz::bench
