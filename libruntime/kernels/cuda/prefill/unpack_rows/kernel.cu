// A block of threads unpacks neighbouring slots of a KV head; a thread has 8 numbers at a time.
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/common/rows8.cuh"
#include "libruntime/kernels/cuda/prefill/unpack_rows/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;

struct Unpack {
  CodedSource from;
  RunLists lists;  // totals null: all rows
  int64_t slots;
  int32_t kv_heads, dim, value_dim;
  UnpackedRows to;
  unsigned long long* vectors;  // may be null

  __device__ int64_t words() const { return UnpackedRows::words(slots); }
  // Bits of slots [32 i, 32 i + 32) of a head: the wanted ones, and the ones that are there.
  __device__ uint32_t& wanted(int64_t head, int64_t i) const { return to.bits[head * words() + i]; }
  __device__ uint32_t& there(int64_t head, int64_t i) const {
    return to.bits[(kv_heads + head) * words() + i];
  }
  __device__ uint32_t cluster_of(int64_t row) const { return from.clusters[row] & ~kFirstSlot; }
};

// Counts mean vectors, and notes what the lists have. A block a list.
__global__ void __launch_bounds__(kThreads) mark_kernel(const __grid_constant__ Unpack p) {
  const int64_t list = int64_t{blockIdx.x} * (p.lists.capacity + 1);
  const int64_t head = blockIdx.x % p.kv_heads;
  uint32_t count = 0;
  const uint32_t runs = p.lists.totals[blockIdx.x].runs;
  for (uint32_t run = threadIdx.x; run < runs; run += kThreads) {
    const uint32_t first = p.lists.first[list + run];
    const uint32_t last = first + p.lists.before[list + run + 1] - p.lists.before[list + run] - 1;
    const int64_t row = head * p.slots;
    count += p.cluster_of(row + last) - p.cluster_of(row + first) + 1;
    for (uint32_t word = first / 32; word <= last / 32; ++word) {
      const uint32_t from = word == first / 32 ? ~0u << first % 32 : ~0u;
      const uint32_t to = word == last / 32 ? ~0u >> (31 - last % 32) : ~0u;
      atomicOr(&p.wanted(head, word), from & to);
    }
  }
  count = __reduce_add_sync(~0u, count);
  if (p.vectors != nullptr && count > 0 && threadIdx.x % 32 == 0) {
    atomicAdd(p.vectors, static_cast<unsigned long long>(count));
  }
}

// Blocks [Hkv * tiles of slots].
template <class Element>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const __grid_constant__ Unpack p) {
  constexpr int kWords = kUnpackRows / 32;
  __shared__ uint32_t rows_of_means[kUnpackRows], slots_of[kUnpackRows], words[kWords];
  const int64_t tiles = UnpackedRows::tiles(p.slots), head = blockIdx.x / tiles;
  const int64_t tile = blockIdx.x % tiles, first = head * p.slots + tile * kUnpackRows;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kWords) {
    const auto left =
        static_cast<int>(min(p.slots - tile * kUnpackRows - 32 * thread, int64_t{32}));
    words[thread] = left <= 0 ? 0 : ~0u >> (32 - left);
    if (p.lists.totals != nullptr) {
      uint32_t& there = p.there(head, tile * kWords + thread);
      words[thread] = p.wanted(head, tile * kWords + thread) & ~there;
      there |= words[thread];
    }
  }
  __syncthreads();
  int rows = 0;
  for (int i = 0; i < kWords; ++i) {
    if (i == thread / 32 && (words[i] >> thread % 32 & 1) != 0) {
      const int at = rows + __popc(words[i] & ((1u << thread % 32) - 1));
      slots_of[at] = thread;
      rows_of_means[at] = static_cast<uint32_t>(head) * p.from.count + p.cluster_of(first + thread);
    }
    rows += __popc(words[i]);
  }
  __syncthreads();
  for (const bool is_key : {true, false}) {
    const int32_t chunks = (is_key ? p.dim : p.value_dim) / 8;
    const CodedRows& coded = is_key ? p.from.keys : p.from.values;
    const auto* all_codes = reinterpret_cast<const uint2*>(coded.codes);
    const auto* all_means =
        static_cast<const uint4*>(is_key ? p.from.mean_keys : p.from.mean_values);
    const auto* scales = static_cast<const uint16_t*>(coded.scales);
    auto* out = static_cast<uint4*>(is_key ? p.to.keys : p.to.values);
#pragma unroll 2
    for (int32_t i = thread; i < rows * chunks; i += kThreads) {
      const int32_t chunk = i % chunks;
      const int64_t row = first + slots_of[i / chunks], at = row * chunks + chunk;
      const uint2 codes = all_codes[at];
      const uint4 means = all_means[int64_t{rows_of_means[i / chunks]} * chunks + chunk];
      out[at] = decode_8<Element>(codes, scales[row] * 0x10001u, means);
    }
  }
}

}  // namespace

Status forget_rows(const AttendParams& params, const UnpackedRows& to, cudaStream_t stream) {
  const int64_t words = 2 * params.kv_heads * UnpackedRows::words(params.slots);
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(to.bits, 0, static_cast<size_t>(words) * sizeof(uint32_t), stream));
  return {};
}

Status unpack_rows(const AttendParams& params, int64_t blocks, const UnpackedRows& to,
                   unsigned long long* vectors, cudaStream_t stream) {
  if (params.slots == 0) return {};
  const Unpack call = {params.coded, params.lists,     params.slots, params.kv_heads,
                       params.dim,   params.value_dim, to,           vectors};
  const auto launch = [&](auto* kernel, int64_t grid, int threads) {
    return launch_blocks(kernel, static_cast<unsigned>(grid), threads, 0, Device(), stream, call);
  };
  if (params.lists.totals != nullptr) {
    const int64_t selections = params.lists.of_heads ? 1 : blocks;
    SQZ_RETURN_IF_ERROR(launch(mark_kernel, selections * params.kv_heads, kThreads));
  }
  return launch(params.dtype == DType::kBF16 ? unpack_kernel<Bf16> : unpack_kernel<F16>,
                params.kv_heads * UnpackedRows::tiles(params.slots), kThreads);
}

}  // namespace sqz::cuda
