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
constexpr size_t kMostBits = 32768;  // bytes of the chosen clusters, a bit each
constexpr int kWarps = kSelectThreads / 32;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr uint32_t kNone = 0xFFFFFFFFu;

struct SelectParams {
  LookupParams lookup;
  PrefillLevel level;
  bool maxima;
  unsigned long long* counters;
  PrefillRuns chosen;
};

// Sums of uint2 over the block.
struct BlockScan {
  static_assert(kWarps == 32);
  uint2 warps[kWarps];

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
    if (warp == 0) {
      uint2 all = warps[lane];
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t x = __shfl_up_sync(kAll, all.x, step);
        const uint32_t y = __shfl_up_sync(kAll, all.y, step);
        if (lane >= step) all = make_uint2(all.x + x, all.y + y);
      }
      warps[lane] = all;
    }
    __syncthreads();
    total = warps[kWarps - 1];
    const uint2 before = warp == 0 ? make_uint2(0, 0) : warps[warp - 1];
    __syncthreads();
    return make_uint2(before.x + sum.x - value.x, before.y + sum.y - value.y);
  }
};

struct Shared {
  BlockScan scan;
  uint32_t histogram[kDigits];
  uint32_t prefix, left;
};

// One list as this kernel works on it.
struct List {
  int32_t count;            // positions
  const uint32_t* ids;      // [count], null: position = cluster
  const uint32_t* offsets;  // [n + 1] of the KV head
  const uint32_t* sizes;    // [n] of the KV head
  float* scores;            // [count] S; of an empty cluster 0
  const uint32_t* wanted;   // [Hkv] or null
  float log_threshold;
  uint32_t* chosen;  // [ceil(count / 32)] bits, in shared memory

  __device__ int32_t words() const { return (count + 31) / 32; }
  // A warp's lanes bring the bits of a word.
  __device__ void set_chosen(int32_t at, bool bit) const {
    const uint32_t word = __ballot_sync(kAll, bit);
    if ((threadIdx.x & 31) == 0 && at < count) chosen[at / 32] = word;
  }
  __device__ uint32_t id(int32_t at) const {
    return ids == nullptr ? static_cast<uint32_t>(at) : ids[at];
  }
  __device__ uint32_t keys(int32_t at) const { return sizes[id(at)]; }
};

// Combined S of every position, over the row tiles of the block, into the first tile's place, and
// which ones the threshold chooses.
__device__ void combine_scores(const SelectParams& params, const List& list, int2 block,
                               int64_t tile_stride) {
  const LookupParams& lookup = params.lookup;
  const int32_t tiles = (block.y + lookup.tiles.tokens - 1) / lookup.tiles.tokens;
  const float share =
      params.maxima ? 1.0f : 1.0f / static_cast<float>(block.y * lookup.tiles.heads);
  for (int32_t first = 0; first < list.count; first += kSelectThreads) {
    const int32_t at = first + static_cast<int32_t>(threadIdx.x);
    float score = 0;
    if (at < list.count) {
      for (int32_t head = 0; head < lookup.heads_apart; ++head) {
        float sum = 0;
        for (int32_t tile = 0; tile < tiles; ++tile) {
          const float value = list.scores[(tile * lookup.heads_apart + head) * tile_stride + at];
          sum = params.maxima ? fmaxf(sum, value) : sum + value;
        }
        score = fmaxf(score, sum * share);
      }
      if (list.keys(at) == 0) score = 0;
      if (list.wanted != nullptr) list.scores[at] = score;
    }
    list.set_chosen(at, score > 0 && logf(score) >= list.log_threshold);
  }
}

// Keys that the threshold chose.
__device__ uint32_t keys_chosen(const List& list, Shared& shared) {
  uint32_t keys = 0;
  for (int32_t at = threadIdx.x; at < list.count; at += kSelectThreads) {
    if (list.chosen[at / 32] >> (at % 32) & 1) keys += list.keys(at);
  }
  uint2 total;
  shared.scan.scan(make_uint2(keys, 0), total);
  return total.x;
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
// one that holds them.
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
        chosen = keys <= rest || (params.level.finest ? 2 * uint64_t{rest} > keys : rest > 0);
      }
      left = total.x <= left ? left - total.x : 0;  // past the border nothing is taken
    }
    list.set_chosen(at, chosen);
  }
}

// Walks the chosen clusters of one word: f(first slot or child, end, whether a run starts here,
// whether it ends here). Chosen clusters are never empty, so that those that touch are one run,
// also over empty ones between them.
template <class Function>
__device__ __forceinline__ void for_each_chosen(const List& list, int32_t word, const Function& f) {
  uint32_t bits = list.chosen[word];
  if (bits == 0) return;
  const auto begin_of = [&](int32_t at) { return list.offsets[list.id(at)]; };
  const auto end_of = [&](int32_t at) { return list.offsets[list.id(at) + 1]; };
  int32_t before = word - 1, after = word + 1;
  while (before >= 0 && list.chosen[before] == 0) --before;
  while (after < list.words() && list.chosen[after] == 0) ++after;
  uint32_t last = before < 0 ? kNone : end_of(32 * before + 31 - __clz(list.chosen[before]));
  uint32_t begin = begin_of(32 * word + __ffs(bits) - 1);
  while (bits != 0) {
    const int32_t at = 32 * word + __ffs(bits) - 1;
    bits &= bits - 1;
    const uint32_t end = end_of(at);
    uint32_t next = kNone;
    if (bits != 0) {
      next = begin_of(32 * word + __ffs(bits) - 1);
    } else if (after < list.words()) {
      next = begin_of(32 * after + __ffs(list.chosen[after]) - 1);
    }
    f(begin, end, begin != last, end != next);
    last = end;
    begin = next;
  }
}

// Runs of what the chosen clusters hold, neighbours merged, in ascending order.
__device__ void write_runs(const SelectParams& params, const List& list, int32_t number,
                           Shared& shared) {
  uint2* runs = params.chosen.runs + static_cast<int64_t>(number) * params.chosen.stride;
  uint32_t* prefix = params.chosen.prefix + static_cast<int64_t>(number) * params.chosen.stride;
  uint2 written = make_uint2(0, 0);  // runs, keys
  for (int32_t first = 0; first < list.words(); first += kSelectThreads) {
    const int32_t word = first + static_cast<int32_t>(threadIdx.x);
    uint2 mine = make_uint2(0, 0), total;
    if (word < list.words()) {
      for_each_chosen(list, word, [&](uint32_t begin, uint32_t end, bool starts, bool) {
        mine = make_uint2(mine.x + starts, mine.y + end - begin);
      });
    }
    const uint2 place = shared.scan.scan(mine, total);
    uint32_t run = written.x + place.x, keys = written.y + place.y;
    if (word < list.words()) {
      // The start of a run and its end may be known to different threads.
      for_each_chosen(list, word, [&](uint32_t begin, uint32_t end, bool starts, bool stops) {
        if (starts) {
          runs[run].x = begin;
          prefix[run] = keys;
          ++run;
        }
        if (stops) runs[run - 1].y = end;
        keys += end - begin;
      });
    }
    written = make_uint2(written.x + total.x, written.y + total.y);
  }
  __syncthreads();
  for (uint32_t run = threadIdx.x; run < written.x; run += kSelectThreads) {
    runs[run].y -= runs[run].x;
  }
  if (threadIdx.x == 0) {
    params.chosen.counts[number] = written.x;
    params.chosen.totals[number] = written.y;
    if (params.counters != nullptr) {
      const bool last = params.level.finest;
      if (last && number % params.lookup.kv_heads == 0) atomicAdd(&params.counters[0], 1ull);
      if (last) atomicAdd(&params.counters[1], static_cast<unsigned long long>(written.y));
      atomicAdd(&params.counters[2], static_cast<unsigned long long>(list.count));
    }
  }
}

__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const __grid_constant__ SelectParams params) {
  __shared__ Shared shared;
  extern __shared__ uint32_t chosen[];
  const LookupParams& lookup = params.lookup;
  const int32_t number = blockIdx.x;
  const int32_t block_number = number / lookup.kv_heads, kv_head = number % lookup.kv_heads;
  const int64_t n = lookup.clusters;
  const bool all = lookup.alive.runs == nullptr;
  List list;
  list.count = all ? lookup.clusters : static_cast<int32_t>(lookup.alive.totals[number]);
  list.ids = all ? nullptr : lookup.ids + number * n;
  list.offsets = params.level.offsets + kv_head * (n + 1);
  list.sizes = lookup.sizes + kv_head * n;
  list.scores = lookup.columns + number * n;
  list.chosen = chosen;
  const int2 block = block_of(lookup.blocks, block_number);
  const int scope = block.y > 1 ? 1 : 0;
  list.wanted = params.level.wanted[scope];
  list.log_threshold = params.level.log_threshold[scope];
  combine_scores(params, list, block, gridDim.x * n);
  __syncthreads();
  if (list.wanted != nullptr) {
    const uint32_t wanted = list.wanted[kv_head];
    const bool enough = !params.level.finest && keys_chosen(list, shared) >= wanted;
    if (!enough) choose_by_budget(params, list, wanted, shared);
    __syncthreads();
  }
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
  select.level = call.level;
  select.counters = call.counters;
  select.maxima = call.policy == PrefillGroup::kAny;
  select.chosen = call.chosen;
  const size_t bits = static_cast<size_t>(params.clusters + 31) / 32 * sizeof(uint32_t);
  if (bits > kMostBits) {
    return {Code::kUnsupported, concat("prefill on the GPU: ", params.clusters,
                                       " clusters, expected at most ", 8 * kMostBits)};
  }
  select_kernel<<<params.blocks.count * params.kv_heads, kSelectThreads, bits, stream>>>(select);
  return cuda_status(cudaGetLastError(), "prefill select kernel");
}

}  // namespace sqz::cuda::prefill
