#include "libruntime/kernels/cuda/batch_lookup/choose.h"

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
  uint32_t run_length = 0;         // of the run that it begins

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
    const unsigned others = ~(bits >> at.lane);
    const int members = others == 0 ? 32 - at.lane : __ffs(static_cast<int>(others)) - 1;
    const uint32_t end = __shfl_sync(~0u, first + length, (at.lane + max(members, 1) - 1) & 31);
    run_length = begins ? end - first : 0;
  }
};

// Words of what was chosen become those of the children, or are counted.
__device__ void pass_on(const BatchLookup& call, const BatchList& own, int k, const Place& at,
                        uint32_t word, Sums (&shared)[kWarps]) {
  const LookupParams& p = call.lookup;
  const LookupLevel& level = p.level[k];
  if (k + 1 < p.levels) {
    if (at.cluster >= level.clusters) return;
    const uint32_t* offsets =
        level.offsets + static_cast<int64_t>(own.head) * (level.clusters + 1) + at.cluster;
    uint32_t* children = own.words(call, k + 1);
#pragma unroll 1
    for (uint32_t child = offsets[0]; child < offsets[1]; ++child) children[child] = word;
    return;
  }
  const Part part(level, own.head, at, word);
  const Sums all = block_sums(at, {part.begins ? 1u : 0u, part.length}, shared);
  const Sums keys = block_sums(at, {part.length * __popc(word), 0}, shared);
  if (at.thread != 0) return;
  call.counts[int64_t{own.list} * gridDim.x + at.tile] = make_uint2(all.a, all.b);
  // The rule kBudget has counted what its requests chose.
  if (p.rule == LookupRule::kThreshold) {
    atomicAdd(&p.counters[1], static_cast<unsigned long long>(keys.a));
  }
}

static_assert(kBatchChoose == 2 * kBatchRows);

struct Rows {
  float lse[kBatchRows];
  uint32_t faults;  // bits of requests
};

// Denominators of the list's rows; bits of the requests where one is NaN or infinite.
__device__ void find_denominators(const BatchLookup& call, const BatchList& own, int parts,
                                  Rows& rows) {
  if (threadIdx.x == 0) rows.faults = 0;
  __syncthreads();
  // Two threads a row.
  const int r = static_cast<int>(threadIdx.x) / 2;
  const float2* sums = call.sums + own.row(call, min(r, own.rows - 1)) * kBatchParts;
  float maximum = kLowestLogit, sum = 0;
#pragma unroll 8
  for (int part = threadIdx.x % 2; part < parts; part += 2) maximum = fmaxf(maximum, sums[part].x);
  maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
#pragma unroll 8
  for (int part = threadIdx.x % 2; part < parts; part += 2) {
    sum += sums[part].y * exp2f(sums[part].x - maximum);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  // Nothing alive: no logit will be compared with it.
  const float lse = sum == 0 ? 0 : maximum + log2f(sum);
  if (r < own.rows && threadIdx.x % 2 == 0) {
    rows.lse[r] = lse;
    if (!(fabsf(lse) <= FLT_MAX)) atomicOr(&rows.faults, 1u << (r / call.lookup.group));
  }
  __syncthreads();
}

template <LookupRule kRule>
__global__ void __launch_bounds__(kBatchChoose)
    batch_choose_kernel(const __grid_constant__ BatchLookup call, int k, int parts) {
  __shared__ Rows rows;
  __shared__ Sums shared[kWarps];
  const LookupParams& p = call.lookup;
  const LookupLevel& level = p.level[k];
  const BatchList own(call, static_cast<int>(blockIdx.y));
  const Place at;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  find_denominators(call, own, parts, rows);
  const uint32_t faults = (k == 0 ? 0 : *own.faults(call, k - 1)) | rows.faults;
  if (at.tile == 0 && at.thread == 0) *own.faults(call, k) = faults;
  uint32_t* words = own.words(call, k);
  const bool is = at.cluster < level.clusters;
  const uint32_t read = !is ? 0 : k == 0 ? own.all : words[at.cluster];
  const int64_t of_head = static_cast<int64_t>(own.head) * level.clusters + at.cluster;
  const uint32_t alive = is && level.log_sizes[of_head] > -INFINITY ? read & ~faults : 0;
  const float* logits = call.logits + own.row(call, 0) * call.stride + at.cluster;
  const float log_group = log2f(static_cast<float>(p.group));
  const float enough = p.mean ? static_cast<float>(p.group) : 1.0f;
  uint32_t word = 0;
#pragma unroll 2
  for (int request = 0; is && request < own.requests; ++request) {
    const bool counts = (alive >> request & 1) != 0;
    // The last head stands in for those that the group lacks: loads without branches are under way
    // together.
    float y[kMostGroup], top = -INFINITY, sum = 0;
#pragma unroll
    for (int g = 0; g < kMostGroup; ++g) {
      y[g] = logits[(request * p.group + min(g, p.group - 1)) * call.stride];
    }
#pragma unroll
    for (int g = 0; g < kMostGroup; ++g) {
      const float lse = rows.lse[request * p.group + min(g, p.group - 1)];
      // As 2^(log2 S - log2 T) with 1: what overflows is chosen, what underflows is far from it.
      y[g] = kRule == LookupRule::kThreshold ? ptx::ex2_approx(y[g] - (lse + level.threshold))
                                             : y[g] - lse;
      top = fmaxf(top, y[g]);
    }
    if constexpr (kRule == LookupRule::kThreshold) {
#pragma unroll
      for (int g = 0; g < kMostGroup; ++g) sum += g < p.group ? y[g] : 0;
      if (counts && (p.mean ? sum : top) >= enough) word |= 1u << request;
    } else {
#pragma unroll
      for (int g = 0; g < kMostGroup; ++g) sum += g < p.group ? exp2f(y[g] - top) : 0;
      const int64_t pair = static_cast<int64_t>(own.first + request) * p.kv_heads + own.head;
      const float score = p.mean ? top + log2f(sum) - log_group : top;
      call.scores[pair * p.width + at.cluster] = counts ? score : -INFINITY;
    }
  }
  const uint32_t centroids = block_sums(at, {static_cast<uint32_t>(__popc(read)), 0}, shared).a;
  if (at.thread == 0) {
    atomicAdd(&p.counters[2], static_cast<unsigned long long>(centroids));
  }
  if constexpr (kRule == LookupRule::kThreshold) {
    if (is) words[at.cluster] = word;
    pass_on(call, own, k, at, word, shared);
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
    if (call.pair_faults[pair] == 0 && call.scores[pair * p.width + at.cluster] > -INFINITY) {
      word |= 1u << request;
    }
  }
  if (at.cluster < p.level[k].clusters) own.words(call, k)[at.cluster] = word;
  pass_on(call, own, k, at, word, shared);
}

__global__ void __launch_bounds__(kBatchChoose)
    batch_emit_kernel(const __grid_constant__ BatchLookup call) {
  __shared__ Sums shared[kWarps];
  const LookupParams& p = call.lookup;
  const int finest = p.levels - 1;
  const LookupLevel& level = p.level[finest];
  const BatchList own(call, static_cast<int>(blockIdx.y));
  const Place at;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const uint32_t word = at.cluster < level.clusters ? own.words(call, finest)[at.cluster] : 0;
  const Part part(level, own.head, at, word);
  // Before this block, and of the list.
  Sums before, all;
  const uint2* counts = call.counts + int64_t{own.list} * gridDim.x;
  for (int tile = at.thread; tile < static_cast<int>(gridDim.x); tile += kBatchChoose) {
    const uint2 count = counts[tile];
    all.a += count.x;
    all.b += count.y;
    before.a += tile < at.tile ? count.x : 0;
    before.b += tile < at.tile ? count.y : 0;
  }
  before = block_sums(at, before, shared);
  all = block_sums(at, all, shared);
  // Before this thread.
  Sums scan = {part.begins ? 1u : 0u, part.length};
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t a = __shfl_up_sync(~0u, scan.a, step), b = __shfl_up_sync(~0u, scan.b, step);
    scan.a += at.lane >= step ? a : 0;
    scan.b += at.lane >= step ? b : 0;
  }
  __syncthreads();
  if (at.lane == 31) shared[at.warp] = scan;
  __syncthreads();
  Sums place = {before.a + scan.a - (part.begins ? 1 : 0), before.b + scan.b - part.length};
  for (int w = 0; w < at.warp; ++w) {
    place.a += shared[w].a;
    place.b += shared[w].b;
  }
  if (part.begins) {
    const int64_t run = int64_t{own.list} * call.runs.stride + place.a;
    call.runs.runs[run] = make_uint2(part.first, part.run_length);
    call.runs.prefix[run] = place.b;
  }
  uint32_t* masks = call.masks + own.list * call.mask_stride;
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const uint32_t length = __shfl_sync(~0u, part.length, i);
    const uint32_t first = __shfl_sync(~0u, place.b, i), mask = __shfl_sync(~0u, word, i);
    for (uint32_t key = at.lane; key < length; key += 32) masks[call.exact + first + key] = mask;
  }
  if (at.tile != 0) return;
  for (int key = at.thread; key < call.exact; key += kBatchChoose) masks[key] = own.all;
  if (at.thread != 0) return;
  call.runs.counts[own.list] = all.a;
  call.runs.totals[own.list] = all.b;
  if (own.head == 0 && p.rule == LookupRule::kThreshold) {
    const int sound = own.requests - __popc(*own.faults(call, finest) & own.all);
    atomicAdd(&p.counters[0], static_cast<unsigned long long>(sound));
  }
}

template <class Kernel, class... Args>
Status launch(Kernel kernel, dim3 blocks, const BatchLookup& call, cudaStream_t stream,
              const Args&... args) {
  LaunchOptions launch(blocks, kBatchChoose, 1, call.lookup.device, stream);
  return launch_team(kernel, launch, 0, call, args...);
}

dim3 choose_blocks(const BatchLookup& call, int level) {
  const int clusters = std::max(call.lookup.level[level].clusters, 1);
  return {static_cast<unsigned>((clusters + kBatchChoose - 1) / kBatchChoose),
          static_cast<unsigned>(call.lists()), 1};
}

}  // namespace

Status launch_batch_choose(const BatchLookup& call, int level, int parts, cudaStream_t stream) {
  const bool budget = call.lookup.rule == LookupRule::kBudget;
  return launch(budget ? batch_choose_kernel<LookupRule::kBudget>
                       : batch_choose_kernel<LookupRule::kThreshold>,
                choose_blocks(call, level), call, stream, level, parts);
}

Status launch_batch_budget(const BatchLookup& call, int level, cudaStream_t stream) {
  return launch(batch_budget_kernel, choose_blocks(call, level), call, stream, level);
}

Status launch_batch_emit(const BatchLookup& call, cudaStream_t stream) {
  return launch(batch_emit_kernel, choose_blocks(call, call.lookup.levels - 1), call, stream);
}

}  // namespace sqz::cuda
