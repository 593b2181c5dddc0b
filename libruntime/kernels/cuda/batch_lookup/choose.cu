#include "libruntime/kernels/cuda/batch_lookup/kernel.h"

#include <algorithm>
#include <cfloat>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/batch_lookup/list.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda {
namespace {

constexpr int kWarps = kBatchChoose / 32;
constexpr uint32_t kCounted = 1u << 31;  // in the upper half of a block's counts

// A block's clusters: thread t has number blockIdx.x * kBatchChoose + t of the level.
struct Place {
  int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int tile = static_cast<int>(blockIdx.x), cluster = tile * kBatchChoose + thread;
};

// Sums over the block, for all threads.
__device__ Sums block_sums(const Place& at, Sums sums, Sums (&shared)[kWarps]) {
  sums.a = __reduce_add_sync(~0u, sums.a);
  sums.b = __reduce_add_sync(~0u, sums.b);
  __syncthreads();
  if (at.lane == 0) shared[at.warp] = sums;
  __syncthreads();
  Sums all;
  for (const Sums& of_warp : shared) {
    all.a += of_warp.a;
    all.b += of_warp.b;
  }
  return all;
}

// The cluster's part of a list: runs end at the latest with a warp's clusters.
struct Part {
  uint32_t first = 0, length = 0;  // slots; none if nobody chose the cluster
  bool begins = false;             // a run

  __device__ Part(const LookupLevel& level, int head, const Place& at, uint32_t word) {
    const bool is = word != 0;
    if (is) {
      const uint32_t* offsets =
          level.offsets + static_cast<int64_t>(head) * (level.clusters + 1) + at.cluster;
      first = offsets[0];
      length = offsets[1] - first;
    }
    const unsigned bits = __ballot_sync(~0u, is);
    begins = is && (at.lane == 0 || (bits >> (at.lane - 1) & 1) == 0);
  }
};

// Runs and keys of the blocks before this one, which began before it and wait for nobody behind
// them. Their counts are 0 until they are there.
__device__ Sums counts_before(const Place& at, const unsigned long long* counts,
                              Sums (&shared)[kWarps]) {
  Sums before;
  for (int tile = at.thread; tile < at.tile; tile += kBatchChoose) {
    unsigned long long count = 0;
    while (count == 0) count = *static_cast<const volatile unsigned long long*>(counts + tile);
    before.a += static_cast<uint32_t>(count >> 32) & ~kCounted;
    before.b += static_cast<uint32_t>(count);
  }
  return block_sums(at, before, shared);
}

// A list of a call that chooses has so many keys. One thread.
__device__ void remember(const BatchLookup& call, uint32_t keys) {
  BatchHistory& history = *call.history;
  atomicAdd(&history.keys, static_cast<unsigned long long>(keys));
  __threadfence();
  if (atomicAdd(&history.lists, 1u) + 1 < static_cast<uint32_t>(call.lists())) return;
  history.next = atomicExch(&history.keys, 0ull) > call.most ? 1 : 0;
  history.lists = history.calls = 0;
}

// A call that reads everything. One thread a list.
__device__ void count_whole(const BatchLookup& call, const BatchList& own) {
  const auto requests = static_cast<unsigned long long>(own.requests);
  atomicAdd(&call.lookup.counters[1], requests * call.lookup.slots);
  if (own.head != 0) return;
  atomicAdd(&call.lookup.counters[0], requests);
  atomicAdd(&call.lookup.counters[3], requests);
  if (own.list == 0 && ++call.history->calls == kBatchAsks - 1) call.history->next = 0;
}

// Runs, and a word for each of their keys.
__device__ void emit(const BatchLookup& call, const BatchList& own, const Place& at, uint32_t word,
                     uint32_t faults, Sums (&shared)[kWarps]) {
  const LookupParams& p = call.lookup;
  const int finest = p.levels - 1;
  const Part part(p.level[finest], own.head, at, word);
  // Before this thread, and of the block.
  const Sums one = {part.begins ? 1u : 0u, part.length};
  Sums scan = one;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t a = __shfl_up_sync(~0u, scan.a, step), b = __shfl_up_sync(~0u, scan.b, step);
    scan.a += at.lane >= step ? a : 0;
    scan.b += at.lane >= step ? b : 0;
  }
  __syncthreads();
  if (at.lane == 31) shared[at.warp] = scan;
  __syncthreads();
  Sums place = {scan.a - one.a, scan.b - one.b}, all;
  for (int w = 0; w < kWarps; ++w) {
    place.a += w < at.warp ? shared[w].a : 0;
    place.b += w < at.warp ? shared[w].b : 0;
    all.a += shared[w].a;
    all.b += shared[w].b;
  }
  unsigned long long* counts = call.counts + int64_t{own.list} * gridDim.x;
  if (at.thread == 0) {
    *static_cast<volatile unsigned long long*>(counts + at.tile) =
        static_cast<unsigned long long>(all.a | kCounted) << 32 | all.b;
  }
  const Sums before = counts_before(at, counts, shared);
  place.a += before.a;
  place.b += before.b;
  const int64_t runs = own.list * (call.runs.capacity + 1);
  if (part.begins) {
    call.runs.first[runs + place.a] = part.first;
    call.runs.before[runs + place.a] = place.b;
  }
  uint32_t* masks = call.masks + own.list * call.mask_stride;
#pragma unroll 4
  for (int i = 0; i < 32; ++i) {
    const uint32_t length = __shfl_sync(~0u, part.length, i);
    const uint32_t first = __shfl_sync(~0u, place.b, i), mask = __shfl_sync(~0u, word, i);
    for (uint32_t key = at.lane; key < length; key += 32) masks[call.exact + first + key] = mask;
  }
  // The rule kBudget has counted what its requests chose.
  if (p.rule == LookupRule::kThreshold) {
    const Sums keys = block_sums(at, {part.length * __popc(word), 0}, shared);
    if (at.thread == 0) atomicAdd(&p.counters[1], static_cast<unsigned long long>(keys.a));
  }
  if (at.tile + 1 == static_cast<int>(gridDim.x) && at.thread == 0) {
    call.runs.before[runs + before.a + all.a] = before.b + all.b;
    call.runs.totals[own.list] = {before.a + all.a, before.b + all.b, faults, 0};
    if (call.history != nullptr) remember(call, before.b + all.b);
  }
  if (at.tile != 0) return;
  for (int key = at.thread; key < call.exact; key += kBatchChoose) masks[key] = own.all;
  if (at.thread == 0 && own.head == 0 && p.rule == LookupRule::kThreshold) {
    const int sound = own.requests - __popc(faults & own.all);
    atomicAdd(&p.counters[0], static_cast<unsigned long long>(sound));
  }
}

// Words of what was chosen become those of the children, or runs.
__device__ void pass_on(const BatchLookup& call, const BatchList& own, int k, const Place& at,
                        uint32_t word, uint32_t faults, Sums (&shared)[kWarps]) {
  const LookupParams& p = call.lookup;
  const LookupLevel& level = p.level[k];
  if (k + 1 == p.levels) return emit(call, own, at, word, faults, shared);
  if (at.cluster >= level.clusters) return;
  const uint32_t* offsets =
      level.offsets + static_cast<int64_t>(own.head) * (level.clusters + 1) + at.cluster;
  uint32_t* children = own.words(call, k + 1);
#pragma unroll 1
  for (uint32_t child = offsets[0]; child < offsets[1]; ++child) children[child] = word;
}

constexpr int kMostRequests = 32;  // of a list

struct Rows {
  float lse[kMostRequests * kMostGroup];  // [request][kHeads], with log2 T for the rule kThreshold
  uint32_t faults;                        // bits of requests
};

// Denominators of the list's rows; bits of the requests where one is NaN or infinite. A head that
// the group lacks has an infinite one, so that it has no share in what is chosen. A warp a row,
// eight under way at once.
template <int kHeads>
__device__ void find_denominators(const BatchLookup& call, const BatchList& own, int parts,
                                  const Place& at, float log_threshold, Rows& rows) {
  constexpr int kAtOnce = 8;
  static_assert(kBatchParts <= 64);
  if (at.thread == 0) rows.faults = 0;
  for (int i = at.thread; i < kMostRequests * kHeads; i += kBatchChoose) rows.lse[i] = INFINITY;
  __syncthreads();
#pragma unroll 1
  for (int first = at.warp * kAtOnce; first < own.rows; first += kWarps * kAtOnce) {
    float2 part[kAtOnce][2];
    float maximum[kAtOnce], sum[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float2* sums = call.sums + own.row(call, min(first + i, own.rows - 1)) * kBatchParts;
      part[i][0] = sums[min(at.lane, parts - 1)];
      part[i][1] = sums[min(at.lane + 32, parts - 1)];
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
      sum[i] = at.lane < parts ? part[i][0].y * exp2f(part[i][0].x - maximum[i]) : 0;
      sum[i] += at.lane + 32 < parts ? part[i][1].y * exp2f(part[i][1].x - maximum[i]) : 0;
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
      top = at.lane == i ? maximum[i] : top;
      total = at.lane == i ? sum[i] : total;
    }
    const int r = first + at.lane, group = call.lookup.group;
    if (at.lane >= kAtOnce || r >= own.rows) continue;
    // Nothing alive: no logit will be compared with it.
    const float lse = total == 0 ? 0 : top + log2f(total);
    rows.lse[r / group * kHeads + r % group] = lse + log_threshold;
    if (!(fabsf(lse) <= FLT_MAX)) atomicOr(&rows.faults, 1u << (r / group));
  }
  __syncthreads();
}

// kHeads: a power of two, at least the group.
template <LookupRule kRule, int kHeads>
__global__ void __launch_bounds__(kBatchChoose)
    batch_choose_kernel(const __grid_constant__ BatchLookup call, int k, int parts) {
  constexpr bool kThreshold = kRule == LookupRule::kThreshold;
  constexpr int kAtOnce = 16 / kHeads;  // requests whose logits are under way together
  __shared__ Rows rows;
  __shared__ Sums shared[kWarps];
  const LookupParams& p = call.lookup;
  const LookupLevel& level = p.level[k];
  const BatchList own(call, static_cast<int>(blockIdx.y));
  const Place at;
  const bool is = at.cluster < level.clusters;
  const int cluster = is ? at.cluster : 0;
  const float* logits = call.logits + own.row(call, 0) * call.stride + cluster;
  int64_t heads[kHeads];  // where their logits are
#pragma unroll
  for (int g = 0; g < kHeads; ++g) heads[g] = min(g, p.group - 1) * call.stride;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (call.history != nullptr && call.history->whole != 0) {
    if (k + 1 == p.levels && at.tile == 0 && at.thread == 0) count_whole(call, own);
    return;
  }
  find_denominators<kHeads>(call, own, parts, at, kThreshold ? level.threshold : 0, rows);
  const uint32_t faults = (k == 0 ? 0 : *own.faults(call, k - 1)) | rows.faults;
  if (at.tile == 0 && at.thread == 0) *own.faults(call, k) = faults;
  uint32_t* words = own.words(call, k);
  const uint32_t read = !is ? 0 : k == 0 ? own.all : words[cluster];
  const int64_t of_head = static_cast<int64_t>(own.head) * level.clusters + cluster;
  const uint32_t alive = is && level.log_sizes[of_head] > -INFINITY ? read & ~faults : 0;
  const float log_group = log2f(static_cast<float>(p.group));
  const float enough = p.mean ? static_cast<float>(p.group) : 1.0f;
  uint32_t word = 0;
#pragma unroll 1
  for (int begin = 0; begin < own.requests; begin += kAtOnce) {
    // Loads without branches before or after them are under way together.
    float y[kAtOnce][kHeads];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float* from =
          logits + min(begin + i, own.requests - 1) * static_cast<int64_t>(p.group) * call.stride;
#pragma unroll
      for (int g = 0; g < kHeads; ++g) y[i][g] = from[heads[g]];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float top = -INFINITY, sum = 0;
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        y[i][g] -= rows.lse[(begin + i) * kHeads + g];
        // As 2^(log2 S - log2 T) with 1: what overflows is chosen, what underflows is far from it.
        if (kThreshold) y[i][g] = ptx::ex2_approx(y[i][g]);
        top = fmaxf(top, y[i][g]);
      }
#pragma unroll
      for (int g = 0; g < kHeads; ++g) sum += kThreshold ? y[i][g] : exp2f(y[i][g] - top);
      if constexpr (kThreshold) {
        word |= ((p.mean ? sum : top) >= enough ? 1u : 0u) << (begin + i);
      } else if (is && begin + i < own.requests) {
        const int request = begin + i;
        const int64_t pair = static_cast<int64_t>(own.first + request) * p.kv_heads + own.head;
        const float score = p.mean ? top + log2f(sum) - log_group : top;
        call.scores[pair * p.width + cluster] = (alive >> request & 1) != 0 ? score : -INFINITY;
      }
    }
  }
  word &= alive;
  const uint32_t centroids = block_sums(at, {static_cast<uint32_t>(__popc(read)), 0}, shared).a;
  if (at.thread == 0) {
    atomicAdd(&p.counters[2], static_cast<unsigned long long>(centroids));
  }
  if constexpr (kThreshold) {
    pass_on(call, own, k, at, word, faults, shared);
  } else if (at.tile == 0 && at.thread < own.requests) {
    const int64_t pair = static_cast<int64_t>(own.first + at.thread) * p.kv_heads + own.head;
    call.pair_faults[pair] = faults >> at.thread & 1;
  }
}

__global__ void __launch_bounds__(kBatchChoose)
    batch_budget_kernel(const __grid_constant__ BatchLookup call, int k) {
  __shared__ Sums shared[kWarps];
  const LookupParams& p = call.lookup;
  const BatchList own(call, static_cast<int>(blockIdx.y));
  const Place at;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  uint32_t word = 0;
#pragma unroll 4
  for (int request = 0; at.cluster < p.level[k].clusters && request < own.requests; ++request) {
    const int64_t pair = static_cast<int64_t>(own.first + request) * p.kv_heads + own.head;
    if (call.pair_faults[pair] == 0 && call.chosen[pair * p.width + at.cluster] != 0) {
      word |= 1u << request;
    }
  }
  pass_on(call, own, k, at, word, *own.faults(call, k), shared);
}

dim3 choose_blocks(const BatchLookup& call, int level) {
  return {static_cast<unsigned>(call.choose_tiles(level)), static_cast<unsigned>(call.lists()), 1};
}

template <LookupRule kRule>
Status launch_choose(const BatchLookup& call, int level, int parts, cudaStream_t stream) {
  const int group = call.lookup.group;
  auto* kernel = group == 1   ? batch_choose_kernel<kRule, 1>
                 : group == 2 ? batch_choose_kernel<kRule, 2>
                 : group <= 4 ? batch_choose_kernel<kRule, 4>
                              : batch_choose_kernel<kRule, kMostGroup>;
  return launch_blocks(kernel, choose_blocks(call, level), kBatchChoose, 0, call.lookup.device,
                       stream, call, level, parts);
}

}  // namespace

Status launch_batch_choose(const BatchLookup& call, int level, int parts, cudaStream_t stream) {
  return call.lookup.rule == LookupRule::kBudget
             ? launch_choose<LookupRule::kBudget>(call, level, parts, stream)
             : launch_choose<LookupRule::kThreshold>(call, level, parts, stream);
}

Status launch_batch_budget(const BatchLookup& call, int level, cudaStream_t stream) {
  return launch_blocks(batch_budget_kernel, choose_blocks(call, level), kBatchChoose, 0,
                       call.lookup.device, stream, call, level);
}

}  // namespace sqz::cuda
