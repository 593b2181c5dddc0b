// What the programs that time kernels on a GPU share. A failure ends the program.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <errno.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "formats/base/status.h"

namespace sqz::test {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what,
               cudaGetErrorString(error));
  std::exit(1);
}

inline void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, status.message().c_str());
  std::exit(1);
}

__device__ inline float gaussian(uint64_t i) {
  auto uniform = [&](uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return (static_cast<float>(x >> 40) + 0.5f) / (1 << 24);
  };
  return sqrtf(-2 * logf(uniform(2 * i))) * cospif(2 * uniform(2 * i + 1));
}

// Gaussian numbers.
static __global__ void fill_kernel(__nv_bfloat16* values, int64_t count, uint64_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    values[i] = __float2bfloat16_rn(gaussian(static_cast<uint64_t>(i) + (seed << 40)));
  }
}

template <class T>
T* allocate(size_t count) {
  void* data = nullptr;
  check(cudaMalloc(&data, count * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(data);
}

// How often work is replayed: `most` times, or until it has taken `enough` milliseconds in `least`
// replays; the first ones, that warm up, do not count.
struct Replays {
  int least, most, warm_up;
  float enough;
};

// Median milliseconds of replays of what `enqueue` puts on the stream.
template <class Enqueue>
double milliseconds(cudaStream_t stream, const Replays& replays, const Enqueue& enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  enqueue();
  check(cudaStreamEndCapture(stream, &graph), "end of capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "graph");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  float total = 0;
  for (int i = 0; i < replays.most && (i < replays.least || total < replays.enough); ++i) {
    check(cudaEventRecord(begin, stream), "record");
    check(cudaGraphLaunch(executable, stream), "launch");
    check(cudaEventRecord(end, stream), "record");
    check(cudaStreamSynchronize(stream), "run");
    float time = 0;
    check(cudaEventElapsedTime(&time, begin, end), "elapsed time");
    if (i >= replays.warm_up) times.push_back(time);
    total += time;
  }
  check(cudaGraphExecDestroy(executable), "graph");
  check(cudaGraphDestroy(graph), "graph");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace sqz::test
