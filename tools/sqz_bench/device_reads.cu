#include "tools/sqz_bench/device_reads.h"

namespace sqz::bench {
namespace {

constexpr int kThreads = 512, kLoads = 8;

// Blocks take pieces of kThreads * kLoads vectors in turn; a thread's loads are all under way at
// once.
__global__ void __launch_bounds__(kThreads)
    read_kernel(const uint4* a, const uint4* b, size_t vectors, unsigned* sink) {
  unsigned mixed = 0;
  for (const uint4* from : {a, b}) {
    for (size_t at = size_t{blockIdx.x} * kThreads * kLoads; at < vectors;
         at += size_t{gridDim.x} * kThreads * kLoads) {
      uint4 loaded[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const size_t place = at + size_t{i} * kThreads + threadIdx.x;
        loaded[i] = place < vectors ? __ldcs(from + place) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        mixed ^= loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
      }
    }
  }
  if (mixed == 0x9e3779b9u) *sink = mixed;
}

}  // namespace

cudaError_t read_device(const void* a, const void* b, size_t bytes, unsigned* sink,
                        cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  read_kernel<<<4 * multiprocessors, kThreads, 0, stream>>>(
      static_cast<const uint4*>(a), static_cast<const uint4*>(b), bytes / sizeof(uint4), sink);
  return cudaGetLastError();
}

}  // namespace sqz::bench
