#include "libindex/cuda/layer/kernels.h"

#include "libindex/cuda/kmeans/common/reduce.cuh"
#include "libindex/cuda/kmeans/common/rows.cuh"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/common/scores.cuh"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChainThreads = 512;
constexpr int kChainWarps = kChainThreads / 32;
constexpr int kMaxDim = 256;

// A thread a component; grid y is the head.
__global__ void __launch_bounds__(kThreads) pack_kernel(const PackParams params) {
  const int64_t head = blockIdx.y;
  const int64_t skipped = params.bad != nullptr ? 0 : params.first;
  const int64_t total =
      static_cast<int64_t>(params.bad != nullptr ? params.tokens : params.count) * params.out_dim;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t token = skipped + i / params.out_dim;
    const int column = static_cast<int>(i % params.out_dim);
    const int64_t from = token * params.dim + column;
    const float x = column < params.dim
                        ? load_1(params.type, params.rows, head * params.head_stride + from)
                        : 0.0f;
    // A NaN differs from itself, a number beyond the type from the largest one of the type.
    if (params.bad != nullptr && saturated(params.out_type, x) != x) {
      const uint64_t place = static_cast<uint64_t>(head) * params.tokens * params.dim + from;
      atomicMin(reinterpret_cast<unsigned long long*>(params.bad), place);
    }
    const int64_t row = token - params.first;
    if (row >= 0 && row < params.count) {
      store_1(params.out_type, params.out, (head * params.count + row) * params.out_dim + column,
              x);
    }
  }
}

__global__ void __launch_bounds__(kThreads) weights_kernel(const WeightParams params) {
  const int64_t cluster = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (cluster >= static_cast<int64_t>(params.heads) * params.clusters) return;
  const int64_t head = cluster / params.clusters;
  const uint32_t* offsets = params.offsets + cluster + head;
  uint32_t weight = offsets[1] - offsets[0];
  if (params.child_weights != nullptr) {
    weight = 0;
    for (uint32_t i = offsets[0]; i < offsets[1]; ++i) {
      const uint32_t child = params.order[head * params.children + i];
      weight += params.child_weights[head * params.children + child];
    }
  }
  params.weights[cluster] = weight;
}

// A warp a cluster.
__global__ void __launch_bounds__(kThreads) chain_norms_kernel(const ChainParams params) {
  const int64_t cluster = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (cluster >= static_cast<int64_t>(params.heads) * params.clusters) return;
  const int lane = threadIdx.x & 31, pieces = params.dim / 8;
  float square = 0;
  if (lane < pieces) {
    float values[8];
    unpack(static_cast<const uint4*>(params.means)[cluster * pieces + lane], values);
    for (int e = 0; e < 8; ++e) square = fmaf(values[e], values[e], square);
  }
  square = warp_sum(square);
  if (lane == 0) params.inverse_norms[cluster] = square > 0 ? 1 / sqrtf(square) : 0.0f;
}

// A block a head: the chain is one long dependence, the candidates of a step are shared by warps.
__global__ void __launch_bounds__(kChainThreads) chain_kernel(const ChainParams params) {
  extern __shared__ uint32_t used[];  // a bit a place of `list`
  __shared__ float last[kMaxDim];
  __shared__ unsigned long long bests[kChainWarps];
  const int64_t first_cluster = static_cast<int64_t>(blockIdx.x) * params.clusters;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pieces = params.dim / 8;
  const uint4* means = static_cast<const uint4*>(params.means) + first_cluster * pieces;
  const float* inverse_norms = params.inverse_norms + first_cluster;
  const uint32_t* list = params.list == nullptr ? nullptr : params.list + first_cluster;
  const uint32_t* groups_at =
      params.groups_at == nullptr
          ? nullptr
          : params.groups_at + static_cast<int64_t>(blockIdx.x) * (params.groups + 1);
  auto cluster_at = [&](uint32_t place) { return list == nullptr ? place : list[place]; };

  for (int i = threadIdx.x; i < (params.clusters + 31) / 32; i += kChainThreads) used[i] = 0;
  uint32_t done = 0;
  for (int group = 0; group < params.groups; ++group) {
    const uint32_t begin = groups_at == nullptr ? 0 : groups_at[group];
    const uint32_t end =
        groups_at == nullptr ? static_cast<uint32_t>(params.clusters) : groups_at[group + 1];
    for (uint32_t step = begin; step < end; ++step, ++done) {
      __syncthreads();  // `last` and `used` are those of the step before
      unsigned long long best = 0;
      if (done == 0 || end - begin == 1) {
        if (threadIdx.x == 0) best = (1ull << 32) | ~begin;
      } else {
        for (uint32_t place = begin + warp; place < end; place += kChainWarps) {
          if (used[place / 32] >> (place % 32) & 1) continue;
          const uint32_t cluster = cluster_at(place);
          float product = 0;
          if (lane < pieces) {
            float values[8];
            unpack(means[static_cast<int64_t>(cluster) * pieces + lane], values);
            for (int e = 0; e < 8; ++e) product = fmaf(values[e], last[8 * lane + e], product);
          }
          const float cosine = warp_sum(product) * inverse_norms[cluster];
          const unsigned long long candidate =
              static_cast<unsigned long long>(rank_of(cosine)) << 32 | ~place;
          if (candidate > best) best = candidate;
        }
      }
      if (lane == 0) bests[warp] = best;
      __syncthreads();
      if (warp != 0) continue;
      best = lane < kChainWarps ? bests[lane] : 0;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        const unsigned long long other = __shfl_xor_sync(~0u, best, offset);
        best = other > best ? other : best;
      }
      const uint32_t place = ~static_cast<uint32_t>(best), cluster = cluster_at(place);
      if (lane < pieces) {
        float values[8];
        unpack(means[static_cast<int64_t>(cluster) * pieces + lane], values);
        const float inverse = inverse_norms[cluster];
        for (int e = 0; e < 8; ++e) last[8 * lane + e] = values[e] * inverse;
      }
      if (lane == 0) {
        used[place / 32] |= 1u << (place % 32);
        params.order[first_cluster + done] = cluster;
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) slots_kernel(const SlotParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t per_head = params.clusters + 1;
  if (i >= params.heads * per_head) return;
  const int64_t head = i / per_head;
  params.slots[i] = params.child_slots[head * (params.children + 1) + params.offsets[i]];
}

unsigned blocks_of(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

Status pack_rows(const PackParams& params, cudaStream_t stream) {
  const int64_t tokens = params.bad != nullptr ? params.tokens : params.count;
  if (tokens == 0) return {};
  const int64_t blocks = (tokens * params.out_dim + 8 * kThreads - 1) / (8 * kThreads);
  const dim3 grid(static_cast<unsigned>(blocks < (1 << 20) ? blocks : 1 << 20),
                  static_cast<unsigned>(params.heads));
  pack_kernel<<<grid, kThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "pack kernel");
}

Status cluster_weights(const WeightParams& params, cudaStream_t stream) {
  weights_kernel<<<blocks_of(int64_t{params.heads} * params.clusters), kThreads, 0, stream>>>(
      params);
  return cuda_status(cudaGetLastError(), "weights kernel");
}

Status chain_clusters(const ChainParams& params, cudaStream_t stream) {
  if (params.dim < 8 || params.dim > kMaxDim || params.dim % 8 != 0) {
    return {Code::kInvalidArgument,
            bad_field("chain_clusters", "dim", concat(params.dim), "a multiple of 8, 8 to 256")};
  }
  const int64_t warps = int64_t{params.heads} * params.clusters;
  chain_norms_kernel<<<blocks_of(warps * 32), kThreads, 0, stream>>>(params);
  const size_t used_bytes = static_cast<size_t>((params.clusters + 31) / 32) * 4;
  chain_kernel<<<static_cast<unsigned>(params.heads), kChainThreads, used_bytes, stream>>>(params);
  return cuda_status(cudaGetLastError(), "chain kernel");
}

Status compose_slots(const SlotParams& params, cudaStream_t stream) {
  slots_kernel<<<blocks_of(params.heads * (int64_t{params.clusters} + 1)), kThreads, 0, stream>>>(
      params);
  return cuda_status(cudaGetLastError(), "slots kernel");
}

}  // namespace sqz::cuda
