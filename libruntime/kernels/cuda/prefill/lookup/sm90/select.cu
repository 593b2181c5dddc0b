// From column sums to runs: one block a list. Clusters stand at positions of the list of those that
// were scored.
#include <cuda_runtime.h>

#include "libruntime/kernels/cuda/prefill/common/dependent.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/sm90/kernel.h"

namespace sqz::cuda::prefill {
namespace {

constexpr int kSelectThreads = 1024;
constexpr int kDigitBits = 11;  // of a score, at a time
constexpr int kDigits = 1 << kDigitBits;
constexpr size_t kMostBits = 32768;  // bytes of the chosen clusters, a bit each
constexpr int kWarps = kSelectThreads / 32;
constexpr unsigned kAll = 0xFFFFFFFFu;

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
  uint32_t ends[kWarps];  // of the runs of each warp's words
  uint2 sums[kWarps];     // their runs and keys
};

// One list as this kernel works on it.
struct List {
  int32_t count;            // positions
  const uint32_t* ids;      // [count], null: position = cluster
  const uint32_t* offsets;  // [n + 1] of the KV head
  const uint32_t* sizes;    // [count] keys
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
  __device__ uint32_t keys(int32_t at) const { return sizes[at]; }
};

// Combined S of every position, over the row tiles of the block, into the first tile's place, and
// which ones the threshold chooses.
__device__ void combine_scores(const PrefillLookupParams& params, const List& list, int2 block,
                               int64_t tile_stride) {
  constexpr int kAtOnce = 8;  // positions of a thread whose scores are under way at the same time
  const int32_t tiles = (block.y + params.column_plan.tokens - 1) / params.column_plan.tokens;
  const float share = 1.0f / static_cast<float>(block.y * params.shape.group);
  for (int32_t first = 0; first < list.count; first += kAtOnce * kSelectThreads) {
    const auto position = [&](int i) {
      return first + i * kSelectThreads + static_cast<int32_t>(threadIdx.x);
    };
    float sums[kAtOnce] = {};
    uint32_t keys[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      keys[i] = position(i) < list.count ? list.keys(position(i)) : 0;
    }
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const float* values = list.scores + tile * tile_stride;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sums[i] += position(i) < list.count ? values[position(i)] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float score = keys[i] == 0 ? 0.0f : sums[i] * share;
      if (list.wanted != nullptr && position(i) < list.count) list.scores[position(i)] = score;
      list.set_chosen(position(i), score > 0 && logf(score) >= list.log_threshold);
    }
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

// The cutoff of the ranking: bits of the score at which `wanted` keys are passed, some at a time
// from the top, and how many keys are left for the clusters of just that score.
__device__ void find_cutoff(const List& list, uint32_t wanted, Shared& shared) {
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
__device__ void choose_by_budget(const PrefillLookupParams& params, const List& list,
                                 uint32_t wanted, Shared& shared) {
  find_cutoff(list, wanted, shared);
  const uint32_t cutoff = shared.prefix;
  uint32_t left = shared.left;
  for (int32_t first = 0; first < list.count; first += kSelectThreads) {
    const int32_t at = first + static_cast<int32_t>(threadIdx.x);
    const uint32_t bits = at < list.count ? __float_as_uint(list.scores[at]) : 0;
    const bool tie = bits != 0 && bits == cutoff;
    bool chosen = bits > cutoff;
    if (__syncthreads_or(tie)) {
      const uint32_t keys = tie ? list.keys(at) : 0;
      uint2 total;
      const uint32_t before = shared.scan.scan(make_uint2(keys, 0), total).x;
      if (tie && before <= left) {
        const uint32_t rest = left - before;
        chosen = keys <= rest || (params.level.finest ? 2 * uint64_t{rest} > keys : rest > 0);
      }
      left = total.x <= left ? left - total.x : 0;  // past the cutoff nothing is taken
    }
    list.set_chosen(at, chosen);
  }
}

// Runs of what the chosen clusters hold, neighbours merged, in ascending order. Chosen clusters are
// never empty, so that those that touch are one run, also over empty ones between them.
__device__ void write_runs(const PrefillLookupParams& params, const List& list, int32_t number,
                           Shared& shared) {
  constexpr int kWords = 8;  // of a warp at the same time
  const RunLists& chosen = params.chosen;
  uint32_t* run_first = chosen.first + number * (chosen.capacity + 1);
  uint32_t* run_before = chosen.before + number * (chosen.capacity + 1);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t lanes_below = (1u << lane) - 1;
  uint2 written = make_uint2(0, 0);  // runs, keys
  uint32_t last_end = 0;             // of the chosen clusters so far; 0: there are none
  for (int32_t first = 0; first < list.words(); first += kWarps * kWords) {
    // Cluster `lane` of each word holds slots or children [begins, ends).
    uint32_t words[kWords], begins[kWords], ends[kWords];
    uint32_t last = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int32_t word = first + warp * kWords + i;
      words[i] = word < list.words() ? list.chosen[word] : 0;
      begins[i] = ends[i] = 0;
      if (words[i] >> lane & 1) {
        const uint32_t* offsets = list.offsets + list.id(32 * word + lane);
        begins[i] = offsets[0];
        ends[i] = offsets[1];
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) last = max(last, ends[i]);
    last = __reduce_max_sync(kAll, last);
    if (lane == 0) shared.ends[warp] = last;
    __syncthreads();
    uint32_t before = __reduce_max_sync(kAll, lane < warp ? shared.ends[lane] : 0);
    before = max(before, last_end);
    last_end = max(last_end, __reduce_max_sync(kAll, shared.ends[lane]));

    uint32_t starts[kWords];  // clusters with which a run starts
    uint2 mine = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t below = words[i] & lanes_below;
      const uint32_t neighbour = __shfl_sync(kAll, ends[i], (31 - __clz(below)) & 31);
      const uint32_t previous = below == 0 ? before : neighbour;
      starts[i] = __ballot_sync(
          kAll, (words[i] >> lane & 1) != 0 && (previous == 0 || previous != begins[i]));
      const uint32_t end = __shfl_sync(kAll, ends[i], (31 - __clz(words[i])) & 31);
      if (words[i] != 0) before = end;
      mine = make_uint2(mine.x + __popc(starts[i]), mine.y + ends[i] - begins[i]);
    }
    mine.y = __reduce_add_sync(kAll, mine.y);
    if (lane == 0) shared.sums[warp] = mine;
    __syncthreads();
    const uint2 of_warp = shared.sums[lane];
    uint2 place = make_uint2(written.x + __reduce_add_sync(kAll, lane < warp ? of_warp.x : 0),
                             written.y + __reduce_add_sync(kAll, lane < warp ? of_warp.y : 0));
    written.x += __reduce_add_sync(kAll, of_warp.x);
    written.y += __reduce_add_sync(kAll, of_warp.y);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (words[i] == 0) continue;
      uint32_t keys = ends[i] - begins[i];  // up to this lane's and with them
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(kAll, keys, step);
        if (lane >= step) keys += other;
      }
      if (starts[i] >> lane & 1) {
        const uint32_t run = place.x + __popc(starts[i] & lanes_below);
        run_first[run] = begins[i];
        run_before[run] = place.y + keys - (ends[i] - begins[i]);
      }
      place = make_uint2(place.x + __popc(starts[i]), place.y + __shfl_sync(kAll, keys, 31));
    }
  }
  if (threadIdx.x == 0) {
    run_before[written.x] = written.y;
    chosen.totals[number].runs = written.x;
    chosen.totals[number].keys = written.y;
    if (params.counters != nullptr) {
      const bool last = params.level.finest;
      if (last && number % params.shape.kv_heads == 0) atomicAdd(&params.counters[0], 1ull);
      if (last) atomicAdd(&params.counters[1], static_cast<unsigned long long>(written.y));
      atomicAdd(&params.counters[2], static_cast<unsigned long long>(list.count));
    }
  }
}

__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const __grid_constant__ PrefillLookupParams params) {
  begin_dependent();
  __shared__ Shared shared;
  extern __shared__ uint32_t chosen[];
  const int32_t number = blockIdx.x;
  const int32_t block_number = number / params.shape.kv_heads,
                kv_head = number % params.shape.kv_heads;
  const int64_t n = params.level.clusters;
  const bool all = params.alive.totals == nullptr;
  List list;
  list.count = alive_clusters(params, number);
  list.ids = all ? nullptr : params.ids + number * n;
  list.offsets = params.level.offsets + kv_head * (n + 1);
  list.sizes = all ? params.level.sizes + kv_head * n : params.alive_sizes + number * n;
  list.scores = params.columns + number * n;
  list.chosen = chosen;
  const int2 block = block_of(params.blocks, block_number);
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

// Runs of alive clusters to ids and sizes of each position, one warp a run.
__device__ void expand(const PrefillLookupParams& params, int64_t list) {
  const uint32_t* sizes = params.level.sizes + list % params.shape.kv_heads * params.level.clusters;
  const RunLists& alive = params.alive;
  const uint32_t* before = alive.before + list * (alive.capacity + 1);
  const uint32_t count = alive.totals[list].runs;
  for (uint32_t run = threadIdx.x / 32; run < count; run += kWarps) {
    const uint32_t first = alive.first[list * (alive.capacity + 1) + run];
    const int64_t to = list * params.level.clusters;
    for (uint32_t i = before[run] + (threadIdx.x & 31); i < before[run + 1]; i += 32) {
      const uint32_t cluster = first + i - before[run];
      params.ids[to + i] = cluster;
      params.alive_sizes[to + i] = sizes[cluster];
    }
  }
}

__global__ void __launch_bounds__(kSelectThreads)
    prepare_kernel(const __grid_constant__ PrefillLookupParams params) {
  begin_dependent();
  const int64_t list = blockIdx.x;
  if (list == 0 && threadIdx.x < 2) params.taken[threadIdx.x] = 0;
  const bool all = params.alive.totals == nullptr;
  if (threadIdx.x == 0) {
    params.chosen.totals[list].fault = all ? 0 : params.alive.totals[list].fault;
  }
  if (!all) expand(params, list);
}

}  // namespace

Status launch_prepare(const PrefillLookupParams& params, cudaStream_t stream) {
  return launch_dependent(prepare_kernel, params.blocks.count * params.shape.kv_heads,
                          kSelectThreads, 0, stream, params);
}

Status launch_select(const PrefillLookupParams& params, cudaStream_t stream) {
  const size_t bits = static_cast<size_t>(params.level.clusters + 31) / 32 * sizeof(uint32_t);
  if (bits > kMostBits) {
    return {Code::kUnsupported, concat("prefill on the GPU: ", params.level.clusters,
                                       " clusters, expected at most ", 8 * kMostBits)};
  }
  return launch_dependent(select_kernel, params.blocks.count * params.shape.kv_heads,
                          kSelectThreads, bits, stream, params);
}

}  // namespace sqz::cuda::prefill
