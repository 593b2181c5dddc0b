// A block of threads unpacks neighbouring slots of a KV head; a thread has 8 numbers at a time.
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/unpack_rows/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256, kRows = 128;

__device__ uint32_t cluster_of(const CodedSource& from, int64_t row) {
  return from.clusters[row] & ~kFirstSlot;
}

struct Unpack {
  CodedSource from;
  int64_t slots;
  int32_t kv_heads, dim;
  void *keys, *values;
};

// Blocks [Hkv * tiles of slots, 2]: keys, then values.
template <class Element>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const __grid_constant__ Unpack p) {
  __shared__ uint32_t rows_of_means[kRows];
  const int64_t tiles = (p.slots + kRows - 1) / kRows, head = blockIdx.x / tiles;
  const int64_t slot = blockIdx.x % tiles * kRows, first = head * p.slots + slot;
  const auto rows = static_cast<int32_t>(min(p.slots - slot, int64_t{kRows}));
  if (threadIdx.x < rows) {
    rows_of_means[threadIdx.x] =
        static_cast<uint32_t>(head) * p.from.count + cluster_of(p.from, first + threadIdx.x);
  }
  __syncthreads();
  const bool is_key = blockIdx.y == 0;
  const CodedRows& coded = is_key ? p.from.keys : p.from.values;
  const auto* all_codes = reinterpret_cast<const uint2*>(coded.codes);
  const auto* all_means = static_cast<const uint4*>(is_key ? p.from.mean_keys : p.from.mean_values);
  const auto* scales = static_cast<const uint16_t*>(coded.scales);
  auto* out = static_cast<uint4*>(is_key ? p.keys : p.values);
  const int32_t chunks = p.dim / 8;
#pragma unroll 2
  for (int32_t i = threadIdx.x; i < rows * chunks; i += kThreads) {
    const int32_t row = i / chunks, chunk = i % chunks;
    const int64_t at = (first + row) * chunks + chunk;
    const uint2 codes = all_codes[at];
    const uint4 means = all_means[int64_t{rows_of_means[row]} * chunks + chunk];
    const float scale = Element::low(scales[first + row]);
    const auto pair = [&](uint32_t two, uint32_t mean_pair) {  // of the lower 16 bits
      const auto a = static_cast<float>(static_cast<int8_t>(two & 0xFF));
      const auto b = static_cast<float>(static_cast<int8_t>(two >> 8 & 0xFF));
      return Element::pack(fmaf(scale, a, Element::low(mean_pair)),
                           fmaf(scale, b, Element::high(mean_pair)));
    };
    out[at] = make_uint4(pair(codes.x, means.x), pair(codes.x >> 16, means.y),
                         pair(codes.y, means.z), pair(codes.y >> 16, means.w));
  }
}

struct Counted {
  CodedSource from;
  RunLists lists;
  int64_t slots, blocks;
  int32_t kv_heads;
  unsigned long long* vectors;
};

// A warp a pair; one in all without lists.
__global__ void count_means_kernel(const __grid_constant__ Counted p) {
  unsigned long long count = 0;
  if (p.lists.totals == nullptr) {
    if (threadIdx.x == 0) count = 2ull * p.blocks * p.kv_heads * p.from.count;
  } else {
    const int64_t pair = blockIdx.x, list = pair * (p.lists.capacity + 1);
    const int64_t head = pair % p.kv_heads * p.slots;
    for (uint32_t run = threadIdx.x; run < p.lists.totals[pair].runs; run += 32) {
      const int64_t first = head + p.lists.first[list + run];
      const uint32_t keys = p.lists.before[list + run + 1] - p.lists.before[list + run];
      count += cluster_of(p.from, first + keys - 1) - cluster_of(p.from, first) + 1;
    }
  }
  if (count > 0) atomicAdd(p.vectors, count);
}

}  // namespace

Status unpack_rows(const AttendParams& params, void* keys, void* values, cudaStream_t stream) {
  if (params.slots == 0) return {};
  const Unpack call = {params.coded, params.slots, params.kv_heads, params.dim, keys, values};
  const int64_t blocks = params.kv_heads * ((params.slots + kRows - 1) / kRows);
  return launch_blocks(params.dtype == DType::kBF16 ? unpack_kernel<Bf16> : unpack_kernel<F16>,
                       dim3(static_cast<unsigned>(blocks), 2), kThreads, 0, Device(), stream, call);
}

Status count_means(const AttendParams& params, int64_t blocks, unsigned long long* vectors,
                   cudaStream_t stream) {
  const int64_t pairs = params.lists.totals == nullptr ? 1 : blocks * params.kv_heads;
  const Counted call = {params.coded, params.lists, params.slots, blocks, params.kv_heads, vectors};
  return launch_blocks(count_means_kernel, static_cast<unsigned>(pairs), 32, 0, Device(), stream,
                       call);
}

}  // namespace sqz::cuda
