// From column sums to runs: one block a list. Clusters stand at positions of the list of those that
// were scored.
#include <cuda_runtime.h>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/prefill_common/rows.cuh"
#include "libruntime/kernels/cuda/prefill_lookup/kernel.h"

namespace sqz::cuda::prefill {
namespace {

constexpr int kSelectThreads = 1024;
constexpr int kDigitBits = 11;  // of a score, at a time
constexpr int kDigits = 1 << kDigitBits;
constexpr int kWarps = kSelectThreads / 32;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct SelectParams {
  LookupParams lookup;
  const uint32_t* offsets;  // [Hkv, n + 1]
  const uint32_t* wanted;   // [Hkv] or null
  float log_threshold;
  bool finest, maxima;
  PrefillRuns chosen;
};

// Sums of uint2 over the block.
struct BlockScan {
  uint2 warps[kWarps + 1];

  // Exclusive; `total` of all threads. All threads.
  __device__ uint2 scan(uint2 value, uint2& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint2 sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t x = __shfl_up_sync(kAll, sum.x, step), y = __shfl_up_sync(kAll, sum.y, step);
      if (lane >= step) sum = make_uint2(sum.x + x, sum.y + y);
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    uint2 before = make_uint2(0, 0);
    total = make_uint2(0, 0);
    for (int i = 0; i < kWarps; ++i) {
      if (i == warp) before = total;
      total = make_uint2(total.x + warps[i].x, total.y + warps[i].y);
    }
    __syncthreads();
    return make_uint2(before.x + sum.x - value.x, before.y + sum.y - value.y);
  }
};

struct Shared {
  BlockScan scan;
  uint32_t histogram[kDigits];
  uint32_t prefix, left, kept;
};

// One list as this kernel works on it.
struct List {
  int32_t count;            // positions
  const uint32_t* ids;      // [count], null: position = cluster
  const uint32_t* offsets;  // [n + 1] of the KV head
  const uint32_t* sizes;    // [n] of the KV head
  float* scores;            // [count] S; of an empty cluster 0

  __device__ uint32_t id(int32_t at) const {
    return ids == nullptr ? static_cast<uint32_t>(at) : ids[at];
  }
  __device__ uint32_t keys(int32_t at) const { return sizes[id(at)]; }
};

__device__ __forceinline__ bool above_threshold(const SelectParams& params, float score) {
  return score > 0 && logf(score) >= params.log_threshold;
}

// Combined S of every position, over the row tiles of the block, into the first tile's place; or,
// where the threshold decides, 1 (chosen) and 0.
__device__ void combine_scores(const SelectParams& params, const List& list, int2 block,
                               int64_t tile_stride) {
  const LookupParams& lookup = params.lookup;
  const int32_t tiles = (block.y + lookup.tiles.tokens - 1) / lookup.tiles.tokens;
  const float share =
      params.maxima ? 1.0f : 1.0f / static_cast<float>(block.y * lookup.tiles.heads);
  for (int32_t at = threadIdx.x; at < list.count; at += kSelectThreads) {
    float best = 0;
    for (int32_t head = 0; head < lookup.heads_apart; ++head) {
      float sum = 0;
      for (int32_t tile = 0; tile < tiles; ++tile) {
        const float value = list.scores[(tile * lookup.heads_apart + head) * tile_stride + at];
        sum = params.maxima ? fmaxf(sum, value) : sum + value;
      }
      best = fmaxf(best, sum * share);
    }
    const float score = list.keys(at) > 0 ? best : 0.0f;
    if (params.wanted != nullptr) {
      list.scores[at] = score;
    } else {
      list.scores[at] = above_threshold(params, score) ? 1.0f : 0.0f;
    }
  }
}

// Replaces scores by 1 (chosen) and 0.
__device__ void choose_by_threshold(const SelectParams& params, const List& list) {
  for (int32_t at = threadIdx.x; at < list.count; at += kSelectThreads) {
    list.scores[at] = above_threshold(params, list.scores[at]) ? 1.0f : 0.0f;
  }
}

__device__ uint32_t keys_above_threshold(const SelectParams& params, const List& list,
                                         Shared& shared) {
  if (threadIdx.x == 0) shared.kept = 0;
  __syncthreads();
  uint32_t keys = 0;
  for (int32_t at = threadIdx.x; at < list.count; at += kSelectThreads) {
    if (above_threshold(params, list.scores[at])) keys += list.keys(at);
  }
  atomicAdd(&shared.kept, keys);
  __syncthreads();
  return shared.kept;
}

// The border of the ranking: bits of the score at which `wanted` keys are passed, some at a time
// from the top, and how many keys are left for the clusters of just that score.
__device__ void find_border(const List& list, uint32_t wanted, Shared& shared) {
  constexpr int kShifts[] = {20, 9, 0};  // of 31 bits: scores have no sign
  static_assert(kDigits == 2 * kSelectThreads);
  if (threadIdx.x == 0) {
    shared.prefix = 0;
    shared.left = wanted;
  }
  int above = 31;
  for (const int shift : kShifts) {
    const uint32_t mask = (1u << (above - shift)) - 1;
    shared.histogram[2 * threadIdx.x] = shared.histogram[2 * threadIdx.x + 1] = 0;
    __syncthreads();
    const uint32_t prefix = shared.prefix, left = shared.left;
    for (int32_t at = threadIdx.x; at < list.count; at += kSelectThreads) {
      const uint32_t bits = __float_as_uint(list.scores[at]);
      if (bits != 0 && bits >> above == prefix) {
        atomicAdd(&shared.histogram[bits >> shift & mask], list.keys(at));
      }
    }
    __syncthreads();
    // Two digits a thread, the highest first: the one at which the keys no longer fit.
    const int first = kDigits - 1 - 2 * static_cast<int>(threadIdx.x);
    const uint32_t keys[2] = {shared.histogram[first], shared.histogram[first - 1]};
    uint2 total;
    uint32_t before = shared.scan.scan(make_uint2(keys[0] + keys[1], 0), total).x;
    for (int i = 0; i < 2; ++i) {
      const bool last = first - i == 0 && total.x <= left;  // everything fits
      if (last || (before <= left && before + keys[i] > left)) {
        shared.prefix = prefix << (above - shift) | static_cast<uint32_t>(first - i);
        shared.left = left - before;
      }
      before += keys[i];
    }
    __syncthreads();
    above = shift;
  }
}

// The prefix of the ranking whose keys are nearest to `wanted` (at the finest level), or the first
// one that holds them. Replaces scores by 1 and 0.
__device__ void choose_by_budget(const SelectParams& params, const List& list, uint32_t wanted,
                                 Shared& shared) {
  find_border(list, wanted, shared);
  const uint32_t border = shared.prefix;
  uint32_t left = shared.left;
  for (int32_t first = 0; first < list.count; first += kSelectThreads) {
    const int32_t at = first + static_cast<int32_t>(threadIdx.x);
    const uint32_t bits = at < list.count ? __float_as_uint(list.scores[at]) : 0;
    const bool tie = bits != 0 && bits == border;
    bool chosen = bits > border;
    if (__syncthreads_or(tie)) {
      const uint32_t keys = tie ? list.keys(at) : 0;
      uint2 total;
      const uint32_t before = shared.scan.scan(make_uint2(keys, 0), total).x;
      if (tie && before <= left) {
        const uint32_t rest = left - before;
        chosen = keys <= rest || (params.finest ? 2 * uint64_t{rest} > keys : rest > 0);
      }
      left = total.x <= left ? left - total.x : 0;  // past the border nothing is taken
    }
    if (at < list.count) list.scores[at] = chosen ? 1.0f : 0.0f;
  }
}

// Runs of what the chosen clusters hold, neighbours merged, in ascending order.
__device__ void write_runs(const SelectParams& params, const List& list, int32_t number,
                           Shared& shared) {
  uint2* runs = params.chosen.runs + static_cast<int64_t>(number) * params.chosen.stride;
  uint32_t* prefix = params.chosen.prefix + static_cast<int64_t>(number) * params.chosen.stride;
  uint2 written = make_uint2(0, 0);  // runs, keys
  for (int32_t first = 0; first < list.count; first += kSelectThreads) {
    const int32_t at = first + static_cast<int32_t>(threadIdx.x);
    uint32_t begin = 0, end = 0;
    const auto read = [&](int32_t position) {
      const uint32_t id = list.id(position);
      begin = list.offsets[id];
      end = list.offsets[id + 1];
    };
    // Whether the nearest cluster in this direction that is not empty is chosen; read on return.
    const auto neighbour_chosen = [&](int32_t step) {
      int32_t position = at + step;
      for (; position >= 0 && position < list.count; position += step) {
        read(position);
        if (end > begin) return list.scores[position] != 0;
      }
      return false;
    };
    const bool chosen = at < list.count && list.scores[at] != 0;
    const bool after = chosen && neighbour_chosen(1);
    const uint32_t next = begin;
    const bool before = chosen && neighbour_chosen(-1);
    const uint32_t last = end;
    if (chosen) read(at);
    const bool starts = chosen && !(before && last == begin);
    const bool stops = chosen && !(after && next == end);
    uint2 total;
    const uint2 place = shared.scan.scan(make_uint2(starts, chosen ? end - begin : 0), total);
    // A run's start knows its first slot and its prefix, its end the rest; the run that a cluster
    // belongs to is the last one that started at or before it.
    if (starts) {
      runs[written.x + place.x].x = begin;
      prefix[written.x + place.x] = written.y + place.y;
    }
    if (stops) runs[written.x + place.x + starts - 1].y = end;
    written = make_uint2(written.x + total.x, written.y + total.y);
  }
  __syncthreads();
  for (uint32_t run = threadIdx.x; run < written.x; run += kSelectThreads) {
    runs[run].y -= runs[run].x;
  }
  if (threadIdx.x == 0) {
    params.chosen.counts[number] = written.x;
    params.chosen.totals[number] = written.y;
  }
}

__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const __grid_constant__ SelectParams params) {
  __shared__ Shared shared;
  const LookupParams& lookup = params.lookup;
  const int32_t number = blockIdx.x;
  const int32_t block_number = number / lookup.kv_heads, kv_head = number % lookup.kv_heads;
  const int64_t n = lookup.clusters;
  const bool all = lookup.alive.runs == nullptr;
  List list;
  list.count = all ? lookup.clusters : static_cast<int32_t>(lookup.alive.totals[number]);
  list.ids = all ? nullptr : lookup.ids + number * n;
  list.offsets = params.offsets + kv_head * (n + 1);
  list.sizes = lookup.sizes + kv_head * n;
  list.scores = lookup.columns + number * n;
  combine_scores(params, list, block_of(lookup.blocks, block_number), gridDim.x * n);
  __syncthreads();
  if (params.wanted != nullptr) {
    const uint32_t wanted = params.wanted[kv_head];
    if (!params.finest && keys_above_threshold(params, list, shared) >= wanted) {
      choose_by_threshold(params, list);
    } else {
      choose_by_budget(params, list, wanted, shared);
    }
  }
  __syncthreads();
  write_runs(params, list, number, shared);
}

// One warp a run.
__global__ void __launch_bounds__(kSelectThreads)
    expand_kernel(const __grid_constant__ LookupParams params) {
  const int64_t list = blockIdx.x;
  const uint32_t* sizes = params.sizes + list % params.kv_heads * params.clusters;
  const uint2* runs = params.alive.runs + list * params.alive.stride;
  const uint32_t* prefix = params.alive.prefix + list * params.alive.stride;
  const uint32_t count = params.alive.counts[list];
  for (uint32_t run = threadIdx.x / 32; run < count; run += kWarps) {
    const uint2 clusters = runs[run];
    const int64_t to = list * params.clusters + prefix[run];
    for (uint32_t i = threadIdx.x & 31; i < clusters.y; i += 32) {
      params.ids[to + i] = clusters.x + i;
      params.alive_sizes[to + i] = sizes[clusters.x + i];
    }
  }
}

}  // namespace

Status launch_expand(const LookupParams& params, cudaStream_t stream) {
  expand_kernel<<<params.blocks.count * params.kv_heads, kSelectThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "prefill expand kernel");
}

Status launch_select(const LookupParams& params, const PrefillLookup& call, cudaStream_t stream) {
  SelectParams select = {};
  select.lookup = params;
  select.offsets = call.level.offsets;
  select.wanted = call.level.wanted;
  select.log_threshold = call.level.log_threshold;
  select.finest = call.level.finest;
  select.maxima = call.policy == PrefillGroup::kAny;
  select.chosen = call.chosen;
  select_kernel<<<params.blocks.count * params.kv_heads, kSelectThreads, 0, stream>>>(select);
  return cuda_status(cudaGetLastError(), "prefill select kernel");
}

}  // namespace sqz::cuda::prefill
