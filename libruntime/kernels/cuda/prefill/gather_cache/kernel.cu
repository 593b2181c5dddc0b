// A thread copies 16 bytes of a key and of its value.
#include "libruntime/kernels/cuda/common/cache_row.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/prefill/gather_cache/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    gather_cache_kernel(const __grid_constant__ AttendParams p,
                        const __grid_constant__ GatheredKeys gathered) {
  const int chunks = p.dim / 8;
  const int64_t rows = p.exact + p.slots, all = p.kv_heads * rows * chunks;
  const auto step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < all; i += step) {
    const int64_t row = i / chunks, chunk = i % chunks;
    const auto head = static_cast<int>(row / rows);
    const int64_t at = row % rows - p.exact;  // below 0: exact
    const int64_t token = at < 0 ? exact_token(p.cache, p.exact, at + p.exact)
                                 : int64_t{p.cache.positions[head * p.slots + at]};
    const int64_t from = cache_bytes(p.cache, cache_row(p.cache, token), head) + 16 * chunk;
    const int64_t to = at < 0 ? (head * p.exact + at + p.exact) * chunks + chunk
                              : (head * p.slots + at) * chunks + chunk;
    static_cast<uint4*>(at < 0 ? gathered.exact_keys : gathered.keys)[to] =
        *reinterpret_cast<const uint4*>(static_cast<const char*>(p.cache.keys) + from);
    static_cast<uint4*>(at < 0 ? gathered.exact_values : gathered.values)[to] =
        *reinterpret_cast<const uint4*>(static_cast<const char*>(p.cache.values) + from);
  }
}

}  // namespace

Status gather_cache(const AttendParams& from, const GatheredKeys& to, cudaStream_t stream) {
  return launch_blocks(gather_cache_kernel, from.device.multiprocessors * 8, kThreads, 0, Device(),
                       stream, from, to);
}

}  // namespace sqz::cuda
