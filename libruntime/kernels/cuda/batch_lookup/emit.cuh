// What the blocks of a list that choose leave: words of the next level's clusters, or at the finest
// level runs and a word for each of their keys.
#pragma once

#include "libruntime/kernels/cuda/batch_lookup/list.cuh"
#include "libruntime/kernels/cuda/decode_lookup/team.cuh"

namespace sqz::cuda {

inline constexpr int kBatchThreads = 256;
inline constexpr int kBatchWarps = kBatchThreads / 32;
inline constexpr uint32_t kBatchCounted = 1u << 31;  // in the upper half of a block's counts

// A block's clusters: each of the first kBatchChoose threads has one of the level's `clusters`.
struct BatchPlace {
  int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int tile = static_cast<int>(blockIdx.x), first = tile * kBatchChoose, cluster = first + thread;
  bool has;  // a cluster

  __device__ explicit BatchPlace(int clusters) : has(thread < kBatchChoose && cluster < clusters) {}
};

// Sums over the block, for all threads.
__device__ inline Sums block_sums(const BatchPlace& at, Sums sums, Sums (&shared)[kBatchWarps]) {
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
struct BatchPart {
  uint32_t first = 0, length = 0;  // slots; none if nobody chose the cluster
  bool begins = false;             // a run

  __device__ BatchPart(const LookupLevel& level, int head, const BatchPlace& at, uint32_t word) {
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
__device__ inline Sums counts_before(const BatchPlace& at, const unsigned long long* counts,
                                     Sums (&shared)[kBatchWarps]) {
  Sums before;
  for (int tile = at.thread; tile < at.tile; tile += kBatchThreads) {
    unsigned long long count = 0;
    while (count == 0) count = *static_cast<const volatile unsigned long long*>(counts + tile);
    before.a += static_cast<uint32_t>(count >> 32) & ~kBatchCounted;
    before.b += static_cast<uint32_t>(count);
  }
  return block_sums(at, before, shared);
}

// A list of a call that chooses has so many keys. One thread.
__device__ inline void remember(const BatchLookup& call, uint32_t keys) {
  BatchHistory& history = *call.history;
  atomicAdd(&history.keys, static_cast<unsigned long long>(keys));
  __threadfence();
  if (atomicAdd(&history.lists, 1u) + 1 < static_cast<uint32_t>(call.lists())) return;
  history.next = atomicExch(&history.keys, 0ull) > call.most ? 1 : 0;
  history.lists = history.calls = 0;
}

// A call that reads everything. One thread a list.
__device__ inline void count_whole(const BatchLookup& call, const BatchList& own) {
  const auto requests = static_cast<unsigned long long>(own.requests);
  atomicAdd(&call.lookup.counters[1], requests * call.lookup.slots);
  if (own.head != 0) return;
  atomicAdd(&call.lookup.counters[0], requests);
  atomicAdd(&call.lookup.counters[3], requests);
  if (own.list == 0 && ++call.history->calls == kBatchAsks - 1) call.history->next = 0;
}

// Runs, and a word for each of their keys.
__device__ inline void emit(const BatchLookup& call, const BatchList& own, const BatchPlace& at,
                            uint32_t word, uint32_t faults, Sums (&shared)[kBatchWarps]) {
  const LookupParams& p = call.lookup;
  const int finest = p.levels - 1;
  const BatchPart part(p.level[finest], own.head, at, word);
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
  for (int w = 0; w < kBatchWarps; ++w) {
    place.a += w < at.warp ? shared[w].a : 0;
    place.b += w < at.warp ? shared[w].b : 0;
    all.a += shared[w].a;
    all.b += shared[w].b;
  }
  unsigned long long* counts = call.counts + int64_t{own.list} * gridDim.x;
  if (at.thread == 0) {
    *static_cast<volatile unsigned long long*>(counts + at.tile) =
        static_cast<unsigned long long>(all.a | kBatchCounted) << 32 | all.b;
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
  for (int key = at.thread; key < call.exact; key += kBatchThreads) masks[key] = own.all;
  if (at.thread == 0 && own.head == 0 && p.rule == LookupRule::kThreshold) {
    const int sound = own.requests - __popc(faults & own.all);
    atomicAdd(&p.counters[0], static_cast<unsigned long long>(sound));
  }
}

// Words of what was chosen become those of the children, or runs.
__device__ inline void pass_on(const BatchLookup& call, const BatchList& own, int k,
                               const BatchPlace& at, uint32_t word, uint32_t faults,
                               Sums (&shared)[kBatchWarps]) {
  const LookupParams& p = call.lookup;
  const LookupLevel& level = p.level[k];
  if (k + 1 == p.levels) return emit(call, own, at, word, faults, shared);
  if (!at.has) return;
  const uint32_t* offsets =
      level.offsets + static_cast<int64_t>(own.head) * (level.clusters + 1) + at.cluster;
  uint32_t* children = own.words(call, k + 1);
#pragma unroll 1
  for (uint32_t child = offsets[0]; child < offsets[1]; ++child) children[child] = word;
}

}  // namespace sqz::cuda
