// The list of work of an attend call, made on the device: the lists' lengths are known there only.
//
// A list's query tiles all cost the same and take their keys from the same memory, so they stand
// together. Lists longer than a limit are split into equal parts; the limit is the one of several
// for which an estimate of the whole time, with what splitting costs, is least. Items are in
// descending order of length, so that the last ones to be taken are short.
//
// Where a head of one index has several lists with masks, part p of n takes tiles p, p + n, … of
// its list: all parts of all lists go through the keys together, and what lists share is in the L2.
#include <cuda_runtime.h>

#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/common/scores.cuh"
#include "libruntime/kernels/cuda/prefill/attend/sm90/kernel.h"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"

namespace sqz::cuda::prefill {
namespace {

constexpr int kScheduleThreads = 1024;
constexpr int kCandidates = 10;  // limits that are compared
constexpr int kBuckets = 64;     // of costs
constexpr int kLeastPart = 8;    // tiles of keys: below, the merge costs more than it gains
constexpr int kItemCost = 1;     // in tiles of keys: beginning and end of an item
constexpr int kPartCost = 3;     // writing and merging of a partial state

// Costs in a call's own tiles: those of 64 rows are a third as large.
__device__ __forceinline__ uint32_t own_tiles(const PrefillAttendParams& params, int tiles) {
  return params.tile_rows < kRows ? 3 * tiles : tiles;
}

// A list's keys and tiles of query rows, read once for the first lists.
struct ListSize {
  int32_t keys, tiles;
};

struct Schedule {
  ListSize lists[kScheduleThreads];
  unsigned long long total;  // of all items, in tiles of keys
  uint32_t longest;          // list, in tiles of keys
  uint32_t limits[kCandidates];
  uint32_t histogram[kCandidates][kBuckets];
  uint32_t longest_part[kCandidates];  // its cost
  uint32_t overhead[kCandidates];
  uint32_t makespan[kCandidates];
  uint32_t cursor[kBuckets];
  uint32_t slots, splits, items;
};

struct Group {
  int32_t block, kv_head;
  int32_t keys, cost;  // cost: tiles of keys
  int32_t tiles;       // of query rows
};

// Lists head after head: blocks of one head share keys.
__device__ ListSize size_at(const PrefillAttendParams& params, int32_t index) {
  const int32_t kv_head = index / params.blocks.count, block = index % params.blocks.count;
  const int32_t list = block * params.shape.kv_heads + kv_head;
  const int32_t tokens = block_of(params.blocks, block).y;
  if (tokens == 0) return {};  // a place of the table without a block
  const RunTotals* totals = params.selected.totals;
  const auto selected =
      static_cast<int32_t>(totals == nullptr ? params.keys.slots : totals[list].keys);
  const auto exact =
      params.own == nullptr ? params.exact : static_cast<int32_t>(totals[list].exact);
  return {exact + selected, (tokens + params.tiles.tokens - 1) / params.tiles.tokens};
}

__device__ Group group_at(const PrefillAttendParams& params, const Schedule& shared,
                          int32_t index) {
  const ListSize size = index < kScheduleThreads ? shared.lists[index] : size_at(params, index);
  return {index % params.blocks.count, index / params.blocks.count, size.keys,
          (size.keys + params.tile_keys - 1) / params.tile_keys, size.tiles};
}

__device__ __forceinline__ int32_t parts_of(const Group& group, uint32_t limit) {
  return max(1, (group.cost + static_cast<int32_t>(limit) - 1) / static_cast<int32_t>(limit));
}

__device__ __forceinline__ int32_t tiles_of_part(const Group& group, int32_t parts) {
  return (group.cost + parts - 1) / parts;
}

// The cost of a part of a list, in tiles of keys.
__device__ __forceinline__ uint32_t cost_of_part(const PrefillAttendParams& params,
                                                 const Group& group, int32_t parts) {
  return tiles_of_part(group, parts) + own_tiles(params, kItemCost + (parts > 1 ? kPartCost : 0));
}

// 0 for the longest part.
__device__ __forceinline__ int bucket_of(uint32_t cost, uint32_t longest) {
  return min(static_cast<int>(uint64_t{longest - cost} * kBuckets / longest), kBuckets - 1);
}

// How long parts in descending order take on `machines`: machine m + 1 of them and the one after
// share. All lanes of a warp, two buckets each.
__device__ uint32_t estimate(const uint32_t* histogram, uint32_t longest, uint32_t machines,
                             unsigned long long total) {
  static_assert(kBuckets == 64);
  const int first = 2 * (threadIdx.x & 31);
  const uint32_t counts[2] = {histogram[first], histogram[first + 1]};
  uint32_t before = scan_warp(counts[0] + counts[1]) - counts[0] - counts[1];
  uint32_t worst = static_cast<uint32_t>((total + machines - 1) / machines);
  for (int i = 0; i < 2; ++i) {
    before += counts[i];
    const auto cost = static_cast<uint32_t>(uint64_t{longest} * (kBuckets - first - i) / kBuckets);
    if (counts[i] != 0) worst = max(worst, ((before - 1) / machines + 1) * cost);
  }
  return __reduce_max_sync(~0u, worst);
}

__global__ void __launch_bounds__(kScheduleThreads)
    schedule_kernel(const __grid_constant__ PrefillAttendParams params, int32_t machines) {
  __shared__ Schedule shared;
  const int thread = threadIdx.x;
  if (thread == 0) {
    shared.total = 0;
    shared.longest = 1;
    shared.slots = shared.splits = shared.items = 0;
  }
  if (thread < kCandidates) shared.overhead[thread] = shared.longest_part[thread] = 0;
  for (int i = thread; i < kCandidates * kBuckets; i += kScheduleThreads) {
    shared.histogram[i / kBuckets][i % kBuckets] = 0;
  }
  begin_dependent();
  const int32_t groups = params.blocks.count * params.shape.kv_heads;
  const uint32_t item_cost = own_tiles(params, kItemCost);
  __syncthreads();
  if (thread < groups) shared.lists[thread] = size_at(params, thread);
  const auto group_of = [&](int32_t i) { return group_at(params, shared, i); };
  unsigned long long total = 0;
  uint32_t longest = 1;
  for (int32_t i = thread; i < groups; i += kScheduleThreads) {
    const Group group = group_of(i);
    total += static_cast<unsigned long long>(group.cost + item_cost) * group.tiles;
    longest = max(longest, static_cast<uint32_t>(group.cost));
  }
  // One addition a warp: 64 bits wide they are slow where many threads want the same place.
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
  longest = __reduce_max_sync(~0u, longest);
  if (thread % 32 == 0 && total != 0) {
    atomicAdd(&shared.total, total);
    atomicMax(&shared.longest, longest);
  }
  __syncthreads();
  // No limit; a fair share and some more, for parts that just fit; then 1, 3/4, 1/2, 3/8, 1/4.
  if (thread < kCandidates) {
    const uint64_t share = shared.total / machines + 1;
    const uint32_t parts_of_32[kCandidates] = {0, 38, 36, 34, 33, 32, 24, 16, 12, 8};
    const uint64_t limit = thread == 0 ? shared.longest : (share * parts_of_32[thread] + 31) / 32;
    shared.limits[thread] = max(static_cast<uint32_t>(min(limit, uint64_t{INT32_MAX / 2})),
                                own_tiles(params, kLeastPart));
  }
  __syncthreads();
  for (int32_t i = thread; i < groups * kCandidates; i += kScheduleThreads) {
    const Group group = group_of(i / kCandidates);
    const int c = i % kCandidates;
    if (group.tiles == 0) continue;
    atomicMax(&shared.longest_part[c],
              cost_of_part(params, group, parts_of(group, shared.limits[c])));
  }
  __syncthreads();
  for (int32_t i = thread; i < groups * kCandidates; i += kScheduleThreads) {
    const Group group = group_of(i / kCandidates);
    const int c = i % kCandidates;
    if (group.tiles == 0) continue;
    const int32_t parts = parts_of(group, shared.limits[c]);
    const uint32_t cost = cost_of_part(params, group, parts);
    atomicAdd(&shared.histogram[c][bucket_of(cost, shared.longest_part[c])],
              static_cast<uint32_t>(group.tiles * parts));
    if (parts > 1) {
      atomicAdd(&shared.overhead[c], group.tiles * parts * own_tiles(params, kPartCost));
    }
  }
  __syncthreads();
  if (thread < 32 * kCandidates) {
    const int c = thread / 32;
    const uint32_t time = estimate(shared.histogram[c], shared.longest_part[c], machines,
                                   shared.total + shared.overhead[c]);
    if (thread % 32 == 0) shared.makespan[c] = time;
  }
  __syncthreads();
  int best = 0;
  for (int c = 1; c < kCandidates; ++c) {
    if (shared.makespan[c] < shared.makespan[best]) best = c;
  }
  if (thread < 32) {
    const uint32_t* counts = shared.histogram[best] + 2 * thread;
    const uint32_t end = scan_warp(counts[0] + counts[1]);
    shared.cursor[2 * thread] = end - counts[1] - counts[0];
    shared.cursor[2 * thread + 1] = end - counts[1];
    if (thread == 31) shared.items = end;
  }
  __syncthreads();
  // Where lists are few, some lanes write the items of one.
  int lanes = 32;
  while (lanes > 1 && groups * lanes > kScheduleThreads) lanes /= 2;
  const int lane = thread % lanes;
  for (int32_t first = 0; first < groups; first += kScheduleThreads / lanes) {
    const int32_t i = first + thread / lanes;
    const Group group = i < groups ? group_of(i) : Group{};
    const int32_t parts = parts_of(group, shared.limits[best]);
    const int32_t part_tiles = tiles_of_part(group, parts), items = group.tiles * parts;
    const bool partial = parts > 1;
    uint32_t at = 0, slot = 0, split = 0;
    if (lane == 0 && items > 0) {
      const uint32_t cost = cost_of_part(params, group, parts);
      at = atomicAdd(&shared.cursor[bucket_of(cost, shared.longest_part[best])],
                     static_cast<uint32_t>(items));
      if (partial) {
        slot = atomicAdd(&shared.slots, static_cast<uint32_t>(items));
        split = atomicAdd(&shared.splits, static_cast<uint32_t>(group.tiles));
      }
    }
    at = __shfl_sync(~0u, at, 0, lanes);
    slot = __shfl_sync(~0u, slot, 0, lanes);
    split = __shfl_sync(~0u, split, 0, lanes);
    // Items are read whole, with what is not used.
    for (int32_t tile = lane; partial && tile < group.tiles; tile += lanes) {
      params.splits[split + tile] = {
          group.block, group.kv_head, tile, static_cast<int32_t>(slot) + tile * parts, parts, {}};
    }
    const bool apart = params.masks == nullptr || params.own != nullptr || params.blocks.count == 1;
    const int32_t keys = (apart ? part_tiles : 1) * params.tile_keys;  // that follow each other
    for (int32_t item = lane; item < items; item += lanes) {
      const int32_t part = item / group.tiles, tile = item % group.tiles;
      const int32_t begin = min(part * keys, group.keys);
      params.items[at + item] = {group.block,
                                 group.kv_head,
                                 tile,
                                 begin,
                                 apart ? min(begin + keys, group.keys) : group.keys,
                                 apart ? params.tile_keys : parts * params.tile_keys,
                                 partial ? static_cast<int32_t>(slot) + tile * parts + part : -1,
                                 0};
    }
  }
  __syncthreads();
  if (thread == 0) *params.counts = {shared.items, shared.splits, 0, 0};
}

}  // namespace

Status launch_schedule(const PrefillAttendParams& params, int multiprocessors,
                       cudaStream_t stream) {
  return launch_blocks(schedule_kernel, 1, kScheduleThreads, 0, kHopper, stream, params,
                       multiprocessors);
}

}  // namespace sqz::cuda::prefill
