#pragma once

#include <cfloat>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/batch_lookup/product.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"

namespace sqz::cuda {

// A part's clusters: their share of the sums of all rows.
template <class Element, int kDim>
__global__ void __launch_bounds__(kBatchThreads, BatchProduct<Element, kDim>::kBlocks)
    batch_sums_kernel(const __grid_constant__ BatchLookup call, int k, int parts) {
  using Product = BatchProduct<Element, kDim>;
  extern __shared__ __align__(16) uint16_t memory[];
  __shared__ float log_sizes[Product::kClusters];
  __shared__ uint32_t alive[Product::kClusters];
  const LookupParams& p = call.lookup;
  const LookupLevel& level = p.level[k];
  const int part = static_cast<int>(blockIdx.x) % parts, thread = static_cast<int>(threadIdx.x);
  const BatchList own(call, static_cast<int>(blockIdx.x) / parts);
  const int tiles = (level.clusters + Product::kClusters - 1) / Product::kClusters;
  const int begin = tiles * part / parts * Product::kClusters;
  const int end = min(tiles * (part + 1) / parts * Product::kClusters, level.clusters);
  const Product product(call, own, k, begin, end, memory);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (call.history != nullptr) {
    const bool whole = (k == 0 ? call.history->next : call.history->whole) != 0;
    if (k == 0 && blockIdx.x == 0 && thread == 0) call.history->whole = whole ? 1 : 0;
    if (whole) {
      ptx::cp_async_wait_group<0>();
      return;
    }
  }
  // Of the kernel that comes next: nothing is counted yet.
  if (k + 1 == p.levels) {
    const int choosing = call.choose_tiles(k), stride = static_cast<int>(blockDim.x);
    for (int i = part * stride + thread; i < choosing; i += parts * stride) {
      call.counts[int64_t{own.list} * choosing + i] = 0;
    }
  }
  product.load_queries();
  const uint32_t* words = k == 0 ? nullptr : own.words(call, k);
  const float* sizes = level.log_sizes + static_cast<int64_t>(own.head) * level.clusters;
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  float maximum[2] = {kLowestLogit, kLowestLogit}, sum[2] = {};
  product.run(
      [&](int tile) {
        if (thread >= Product::kClusters) return;
        const int j = tile + thread;
        log_sizes[thread] = j < end ? sizes[j] * 1.4426950408889634f : -INFINITY;
        alive[thread] = j < end && words != nullptr ? words[j] : 0;
      },
      [&](int, float(&x)[Product::kTiles][4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int request = min((row + 8 * half) / own.heads, 31);
#pragma unroll
          for (int i = 0; i < 2 * Product::kTiles; ++i) {
            const int at = i / 2 * 8 + 2 * (lane % 4) + i % 2;
            float& logit = x[i / 2][2 * half + i % 2];
            logit += log_sizes[at];
            if (words != nullptr && (alive[at] >> request & 1) == 0) logit = -INFINITY;
          }
          add_exponentials(x, half, maximum[half], sum[half]);
        }
      });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    add_sums_of_lanes(maximum[half], sum[half]);
    if (row + 8 * half >= own.rows || lane % 4 != 0) continue;
    own.sums(call, row + 8 * half)[part] = make_float2(maximum[half], sum[half]);
  }
}

struct BatchRowsShared {
  float lse[kBatchRows];  // with log2 T for the rule kThreshold
  uint32_t faults;        // bits of requests
};

// Denominators of the list's rows; bits of the requests where one is NaN or infinite. A head that
// the group lacks has an infinite one, so that it has no share in what is chosen. A warp a row,
// eight under way at once.
__device__ inline void find_denominators(const BatchLookup& call, const BatchList& own, int parts,
                                         float log_threshold, BatchRowsShared& rows) {
  constexpr int kAtOnce = 8;
  static_assert(kBatchParts <= 64);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  if (thread == 0) rows.faults = 0;
  __syncthreads();
#pragma unroll 1
  for (int first = warp * kAtOnce; first < own.rows; first += kBatchWarps * kAtOnce) {
    float2 part[kAtOnce][2];
    float maximum[kAtOnce], sum[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float2* sums = own.sums(call, min(first + i, own.rows - 1));
      part[i][0] = sums[min(lane, parts - 1)];
      part[i][1] = sums[min(lane + 32, parts - 1)];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      maximum[i] = fmaxf(kLowestLogit, fmaxf(part[i][0].x, part[i][1].x));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(~0u, maximum[i], step));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sum[i] = lane < parts ? part[i][0].y * exp2f(part[i][0].x - maximum[i]) : 0;
      sum[i] += lane + 32 < parts ? part[i][1].y * exp2f(part[i][1].x - maximum[i]) : 0;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], step);
    }
    // Lane i ends row i.
    float top = maximum[0], total = sum[0];
#pragma unroll
    for (int i = 1; i < kAtOnce; ++i) {
      top = lane == i ? maximum[i] : top;
      total = lane == i ? sum[i] : total;
    }
    const int r = first + lane;
    if (lane >= kAtOnce || r >= own.rows) continue;
    const bool is = r % own.heads < call.lookup.group;
    // Nothing alive: no logit will be compared with it.
    const float lse = total == 0 ? 0 : top + log2f(total);
    rows.lse[r] = is ? lse + log_threshold : INFINITY;
    if (is && !(fabsf(lse) <= FLT_MAX)) atomicOr(&rows.faults, 1u << (r / own.heads));
  }
  __syncthreads();
}

// Sums, or maxima, over the heads of each request, for all of these rows' lanes.
template <int kCount>
__device__ __forceinline__ void add_heads(int heads, bool maxima, float (&x)[kCount]) {
#pragma unroll 1
  for (int step = 4; step < 4 * heads; step *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], step);
      x[i] = maxima ? fmaxf(x[i], other) : x[i] + other;
    }
  }
}

template <class Element, int kDim>
__global__ void __launch_bounds__(kBatchThreads, BatchProduct<Element, kDim>::kBlocks)
    batch_choose_kernel(const __grid_constant__ BatchLookup call, int k, int parts) {
  using Product = BatchProduct<Element, kDim>;
  static_assert(kBatchChoose % Product::kClusters == 0);
  extern __shared__ __align__(16) uint16_t memory[];
  __shared__ BatchRowsShared rows;
  __shared__ uint32_t alive_words[kBatchChoose], chosen[kBatchChoose];
  __shared__ Sums shared[kBatchWarps];
  const LookupParams& p = call.lookup;
  const LookupLevel& level = p.level[k];
  const BatchList own(call, static_cast<int>(blockIdx.y));
  const BatchPlace at(level.clusters);
  const Product product(call, own, k, at.first, min(at.first + kBatchChoose, level.clusters),
                        memory);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (call.history != nullptr && call.history->whole != 0) {
    if (k + 1 == p.levels && at.tile == 0 && at.thread == 0) count_whole(call, own);
    ptx::cp_async_wait_group<0>();
    return;
  }
  const bool threshold = p.rule == LookupRule::kThreshold;
  product.load_queries();
  find_denominators(call, own, parts, threshold ? level.threshold : 0, rows);
  const uint32_t faults = (k == 0 ? 0 : *own.faults(call, k - 1)) | rows.faults;
  if (at.tile == 0 && at.thread == 0) *own.faults(call, k) = faults;
  uint32_t read = 0, alive = 0;
  if (at.has) {
    read = k == 0 ? own.all : own.words(call, k)[at.cluster];
    const int64_t of_head = static_cast<int64_t>(own.head) * level.clusters + at.cluster;
    alive = level.log_sizes[of_head] > -INFINITY ? read & ~faults : 0;
  }
  if (at.thread < kBatchChoose) {
    alive_words[at.thread] = alive;
    chosen[at.thread] = 0;
  }
  const bool leads = at.lane / 4 % own.heads == 0;  // one of the lanes with the same sums
  const float enough = p.mean ? static_cast<float>(p.group) : 1.0f;
  const float log_group = log2f(static_cast<float>(p.group));
  product.run([](int) {},
              [&](int tile, float(&logits)[Product::kTiles][4]) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const int row = at.warp * 16 + 8 * half + at.lane / 4, request = row / own.heads;
                  const bool is = leads && row < own.rows;
                  const float lse = row < own.rows ? rows.lse[row] : INFINITY;
                  const int first = tile - at.first + 2 * (at.lane % 4);
                  const auto place = [&](int i) { return first + i / 2 * 8 + i % 2; };
                  float x[2 * Product::kTiles];
#pragma unroll
                  for (int i = 0; i < 2 * Product::kTiles; ++i) {
                    x[i] = logits[i / 2][2 * half + i % 2] - lse;
                    // As 2^(log2 S - log2 T) with 1: what overflows is chosen, what underflows is
                    // far from it.
                    if (threshold) x[i] = ptx::ex2_approx(x[i]);
                  }
                  if (threshold) {
                    add_heads(own.heads, !p.mean, x);
#pragma unroll
                    for (int i = 0; i < 2 * Product::kTiles; ++i) {
                      if (is && x[i] >= enough) atomicOr(&chosen[place(i)], 1u << request);
                    }
                    continue;
                  }
                  float top[2 * Product::kTiles];
#pragma unroll
                  for (int i = 0; i < 2 * Product::kTiles; ++i) top[i] = x[i];
                  add_heads(own.heads, true, top);
                  if (p.mean) {
#pragma unroll
                    for (int i = 0; i < 2 * Product::kTiles; ++i) x[i] = exp2f(x[i] - top[i]);
                    add_heads(own.heads, false, x);
#pragma unroll
                    for (int i = 0; i < 2 * Product::kTiles; ++i) {
                      top[i] += log2f(x[i]) - log_group;
                    }
                  }
                  float* scores =
                      call.scores +
                      (static_cast<int64_t>(own.first + request) * p.kv_heads + own.head) * p.width;
#pragma unroll
                  for (int i = 0; i < 2 * Product::kTiles; ++i) {
                    const int cluster = at.first + place(i);
                    if (!is || cluster >= level.clusters) continue;
                    scores[cluster] =
                        (alive_words[place(i)] >> request & 1) != 0 ? top[i] : -INFINITY;
                  }
                }
              });
  const uint32_t centroids = block_sums(at, {static_cast<uint32_t>(__popc(read)), 0}, shared).a;
  if (at.thread == 0) {
    atomicAdd(&p.counters[2], static_cast<unsigned long long>(centroids));
  }
  if (threshold) {
    pass_on(call, own, k, at, at.thread < kBatchChoose ? chosen[at.thread] & alive : 0, faults,
            shared);
  } else if (at.tile == 0 && at.thread < own.requests) {
    const int64_t pair = static_cast<int64_t>(own.first + at.thread) * p.kv_heads + own.head;
    call.pair_faults[pair] = faults >> at.thread & 1;
  }
}

// A level's rows of memory and threads.
inline int batch_rows(const BatchLookup& call) {
  return (call.chunk * BatchLookup::padded(call.lookup.group) + 15) / 16 * 16;
}

template <int kDim>
Status launch_batch_sums(const BatchLookup& call, int level, int parts, cudaStream_t stream) {
  const LookupParams& p = call.lookup;
  auto* kernel =
      p.dtype == DType::kBF16 ? batch_sums_kernel<Bf16, kDim> : batch_sums_kernel<F16, kDim>;
  return launch_blocks(kernel, call.lists() * parts, std::max(64, 2 * batch_rows(call)),
                       BatchProduct<Bf16, kDim>::shared_bytes(batch_rows(call)), p.device, stream,
                       call, level, parts);
}

template <int kDim>
Status launch_batch_choose(const BatchLookup& call, int level, int parts, cudaStream_t stream) {
  const LookupParams& p = call.lookup;
  auto* kernel =
      p.dtype == DType::kBF16 ? batch_choose_kernel<Bf16, kDim> : batch_choose_kernel<F16, kDim>;
  const dim3 blocks(static_cast<unsigned>(call.choose_tiles(level)),
                    static_cast<unsigned>(call.lists()));
  return launch_blocks(kernel, blocks, kBatchThreads,
                       BatchProduct<Bf16, kDim>::shared_bytes(batch_rows(call)), p.device, stream,
                       call, level, parts);
}

}  // namespace sqz::cuda
