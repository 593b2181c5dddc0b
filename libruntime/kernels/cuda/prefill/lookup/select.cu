// From column sums to runs: one block a list. Clusters stand at positions of the list of those that
// were scored.
#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/select.h"

#include <cuda_runtime.h>

#include "libruntime/kernels/cuda/common/scores.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kSelectThreads = 1024;   // where lists are few,
constexpr int kManyListThreads = 256;  // and where several blocks share a multiprocessor
constexpr int kDigits = 1 << 11;       // of a rank, 11 bits at a time
constexpr uint32_t kCandidates = 768;
constexpr size_t kMostBits = 32768;  // bytes of the chosen clusters, a bit each
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Shared {
  uint32_t histogram[kDigits];    // keys by digit
  uint2 candidates[kCandidates];  // ranks with the first digit of the cutoff, and their keys
  uint32_t found;                 // of them
  uint32_t prefix, left, keys;    // results of find_digit(); `keys` are those of the last digit
  uint32_t scan[32], ends[32];    // by warp: a sum, the end of its words' runs,
  uint2 sums[32];                 // their runs and keys; 0 where there is no such warp

  template <int kThreads>
  __device__ void clear() {
    for (int i = threadIdx.x; i < kDigits; i += kThreads) histogram[i] = 0;
    if (threadIdx.x == 0) found = 0;
    if (threadIdx.x >= 32) return;
    scan[threadIdx.x] = ends[threadIdx.x] = 0;
    sums[threadIdx.x] = make_uint2(0, 0);
  }

  // Sum of the threads before this one; `total` of all. All threads.
  __device__ uint32_t sum_before(uint32_t own, uint32_t& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t before = scan_warp(own);
    if (lane == 31) scan[warp] = before;
    __syncthreads();
    const uint32_t of_warp = scan[lane];
    total = __reduce_add_sync(kAll, of_warp);
    before += __reduce_add_sync(kAll, lane < warp ? of_warp : 0) - own;
    __syncthreads();
    return before;
  }
};

// One list as this kernel works on it.
template <int kThreads>
struct List {
  // Positions of a thread that are under way at the same time.
  static constexpr int kAtOnce = kThreads == kManyListThreads ? 8 : 4;

  int32_t count;            // positions
  const uint32_t* ids;      // [count], null: position = cluster
  const uint32_t* offsets;  // [n + 1] of the KV head
  const uint32_t* sizes;    // [count] keys; null: 1 each
  float* scores;            // [count] log2 S; of an empty cluster -infinity
  uint32_t* ranks;          // [count] in their place: see rank_of_score()
  const uint32_t* wanted;   // [Hkv] or null
  float threshold;          // log2
  bool logarithms;          // scores are, and not bounds of pages
  uint32_t* chosen;         // [ceil(count / 32)] bits, in shared memory
  bool fault;               // nothing is chosen, and nothing counted
  bool finest;
  unsigned long long* counters;  // may be null

  __device__ int32_t words() const { return (count + 31) / 32; }
  // The bit of position first + i kThreads: a warp's lanes bring those of a word.
  __device__ void set_chosen(int32_t first, int i, bool bit) const {
    const uint32_t word = __ballot_sync(kAll, bit);
    if ((threadIdx.x & 31) == 0 && first + i * kThreads < count) {
      (chosen + first / 32)[i * (kThreads / 32)] = word;
    }
  }
  __device__ uint32_t id(int32_t at) const {
    return ids == nullptr ? static_cast<uint32_t>(at) : ids[at];
  }
  // The end of a loop that begins at threadIdx.x: all threads leave it together, when the first one
  // is beyond the list.
  __device__ int32_t end() const { return count + static_cast<int32_t>(threadIdx.x); }
  // The keys of position first + i kThreads, 0 beyond the list. load_ranks() numbers them likewise.
  __device__ uint32_t keys(int32_t first, int i) const {
    if (first + i * kThreads >= count) return 0;
    return sizes == nullptr ? 1 : (sizes + first)[i * kThreads];
  }
  __device__ void load_ranks(int32_t first, uint32_t (&to)[kAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      to[i] = first + i * kThreads < count ? (ranks + first)[i * kThreads] : 0;
    }
  }
};

constexpr float kMostLogarithm = 0.75f;  // S is at most 1, and what rounding adds

// Greater scores have greater ranks; 0: there is none. Logarithms from -64 on have ranks as far
// apart as they are: those of floats fill a few of a histogram's bins, and threads wait for each
// other.
__device__ __forceinline__ uint32_t rank_of_score(bool logarithm, float score) {
  const int spread = __float2int_rd(fminf(score, kMostLogarithm) * 0x1p25f);
  const bool is_spread = logarithm && score >= -64;
  const uint32_t rank = is_spread ? 0xFE000000u + static_cast<uint32_t>(spread) : rank_of(score);
  return score > -INFINITY ? rank : 0;
}

constexpr int kFirstShift = 21;  // of a rank's first digit

// From scores, which come as sums over the row tiles of the block if kSums. By the rule kBudget
// ranks take their place, and the histogram has their first digits. Unless this is the finest level
// of that rule, chooses what the threshold does, and returns the keys that this thread chose.
template <bool kSums, int kThreads>
__device__ uint32_t rank_scores(const SelectRuns& call, const List<kThreads>& list, int2 block,
                                int64_t tile_stride, Shared& shared) {
  constexpr int kAtOnce = List<kThreads>::kAtOnce;
  const int32_t tiles = kSums ? (block.y + call.tile_tokens - 1) / call.tile_tokens : 1;
  const float log_share = log2f(static_cast<float>(block.y * call.shape.group));
  const bool by_budget = list.wanted != nullptr, by_threshold = !by_budget || !list.finest;
  const bool none = list.logarithms && !(list.threshold <= kMostLogarithm);
  const uint32_t cutoff = none ? ~0u : max(rank_of_score(list.logarithms, list.threshold), 1);
  uint32_t chosen = 0;
#pragma unroll 1
  for (int32_t first = threadIdx.x; first < list.end(); first += kAtOnce * kThreads) {
    float values[kAtOnce] = {};
    uint32_t keys[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) keys[i] = list.keys(first, i);
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const float* from = list.scores + tile * tile_stride + first;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kThreads < list.count) values[i] += from[i * kThreads];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float score = kSums ? log2f(values[i]) - log_share : values[i];
      const uint32_t rank = keys[i] == 0 ? 0 : rank_of_score(list.logarithms, score);
      if (by_budget) {
        if (first + i * kThreads < list.count) (list.ranks + first)[i * kThreads] = rank;
        if (rank != 0) atomicAdd(&shared.histogram[rank >> kFirstShift], keys[i]);
      }
      if (by_threshold) {
        list.set_chosen(first, i, rank >= cutoff);
        if (rank >= cutoff) chosen += keys[i];
      }
    }
  }
  return chosen;
}

// Chooses the positions with a rank of at least `cutoff`, which is not 0.
template <int kThreads>
__device__ void choose_from(const List<kThreads>& list, uint32_t cutoff) {
  constexpr int kAtOnce = List<kThreads>::kAtOnce;
#pragma unroll 1
  for (int32_t first = threadIdx.x; first < list.end(); first += kAtOnce * kThreads) {
    uint32_t ranks[kAtOnce];
    list.load_ranks(first, ranks);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) list.set_chosen(first, i, ranks[i] >= cutoff);
  }
}

// The digit at which the keys no longer fit, from the highest on: of the histogram, whose ranks
// begin with shared.prefix.
template <int kThreads>
__device__ void find_digit(int bits, Shared& shared) {
  __syncthreads();
  const uint32_t prefix = shared.prefix, left = shared.left;
  constexpr int kEach = kDigits / kThreads;
  const int first = kDigits - 1 - kEach * static_cast<int>(threadIdx.x);
  uint32_t keys = 0, total;
  for (int i = 0; i < kEach; ++i) keys += shared.histogram[first - i];
  uint32_t before = shared.sum_before(keys, total);
  for (int i = 0; i < kEach; ++i) {
    const uint32_t own = shared.histogram[first - i];
    const bool last = first - i == 0 && total <= left;  // everything fits
    if (last || (before <= left && before + own > left)) {
      shared.prefix = prefix << bits | static_cast<uint32_t>(first - i);
      shared.left = left - before;
      shared.keys = own;
    }
    before += own;
  }
  __syncthreads();
}

// The cutoff of the ranking: the rank at which `wanted` keys are passed, and how many keys are left
// for the clusters of just that rank. A digit at a time, after the first one of those that share
// it, which are few as a rule. Returns whether several clusters may have just that rank.
template <int kThreads>
__device__ bool find_cutoff(const List<kThreads>& list, uint32_t wanted, Shared& shared) {
  if (threadIdx.x == 0) {
    shared.prefix = 0;
    shared.left = wanted;
  }
  find_digit<kThreads>(32 - kFirstShift, shared);
  const uint32_t digit = shared.prefix;
  constexpr int kAtOnce = List<kThreads>::kAtOnce;
  const auto for_ranks = [&](const auto& body) {
#pragma unroll 1
    for (int32_t first = threadIdx.x; first < list.end(); first += kAtOnce * kThreads) {
      uint32_t ranks[kAtOnce];
      list.load_ranks(first, ranks);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (ranks[i] == 0 || ranks[i] >> kFirstShift != digit) continue;
        body(ranks[i], list.keys(first, i));
      }
    }
  };
  for_ranks([&](uint32_t rank, uint32_t keys) {
    const uint32_t to = atomicAdd(&shared.found, 1);
    if (to < kCandidates) shared.candidates[to] = make_uint2(rank, keys);
  });
  __syncthreads();
  const uint32_t found = shared.found;
  const auto for_candidates = [&](const auto& body) {
    for (uint32_t i = threadIdx.x; i < found; i += kThreads) {
      body(shared.candidates[i].x, shared.candidates[i].y);
    }
  };
  constexpr int kShifts[] = {10, 0};
  int above = kFirstShift;
#pragma unroll
  for (const int shift : kShifts) {
    const uint32_t mask = (1u << (above - shift)) - 1, prefix = shared.prefix;
    for (int i = threadIdx.x; i < kDigits; i += kThreads) shared.histogram[i] = 0;
    __syncthreads();
    const auto add = [&](uint32_t rank, uint32_t keys) {
      if (rank >> above == prefix) atomicAdd(&shared.histogram[rank >> shift & mask], keys);
    };
    if (found <= kCandidates) {
      for_candidates(add);
    } else {
      for_ranks(add);
    }
    find_digit<kThreads>(above - shift, shared);
    above = shift;
  }
  if (found > kCandidates) return true;
  bool several = false;
  for_candidates([&](uint32_t rank, uint32_t keys) {
    several |= rank == shared.prefix && keys != shared.keys;
  });
  return __syncthreads_or(several) != 0;
}

// The prefix of the ranking whose keys are nearest to `wanted` (at the finest level), or the first
// one that holds them. Returns the keys that this thread chose.
template <int kThreads>
__device__ uint32_t choose_by_budget(const List<kThreads>& list, uint32_t wanted, Shared& shared) {
  const bool several = find_cutoff(list, wanted, shared);
  const uint32_t cutoff = shared.prefix;
  uint32_t left = shared.left, keys_chosen = 0;
  const auto fits = [&](uint32_t keys, uint32_t rest) {
    return list.finest ? 2 * uint64_t{rest} > keys : rest > 0;
  };
  if (!several) {
    const bool all = fits(shared.keys, left);
    choose_from(list, max(cutoff + (all ? 0 : 1), 1));
    return threadIdx.x == 0 ? wanted - left + (all ? shared.keys : 0) : 0;
  }
#pragma unroll 1
  for (int32_t first = threadIdx.x; first < list.end(); first += kThreads) {
    const uint32_t rank = first < list.count ? list.ranks[first] : 0;
    const bool tie = rank != 0 && rank == cutoff;
    const uint32_t keys = rank != 0 && rank >= cutoff ? list.keys(first, 0) : 0;
    bool chosen = rank > cutoff;
    if (__syncthreads_or(tie)) {
      uint32_t total;
      const uint32_t before = shared.sum_before(tie ? keys : 0, total);
      if (tie && before <= left) chosen = fits(keys, left - before);
      left = total <= left ? left - total : 0;  // past the cutoff nothing is taken
    }
    list.set_chosen(first, 0, chosen);
    if (chosen) keys_chosen += keys;
  }
  return keys_chosen;
}

// Adds what was read of a list. One thread.
template <int kThreads>
__device__ void count(const SelectRuns& call, const List<kThreads>& list, int32_t number,
                      uint32_t keys) {
  if (list.counters == nullptr || list.fault) return;
  const auto vectors = static_cast<unsigned long long>(list.count) * call.vectors;
  if (vectors > 0) atomicAdd(&list.counters[2], vectors);
  if (!list.finest) return;
  if (number % call.shape.kv_heads == 0) atomicAdd(&list.counters[0], 1ull);
  atomicAdd(&list.counters[1], static_cast<unsigned long long>(keys));
}

// Runs of what the chosen clusters hold, neighbours merged, in ascending order. Chosen clusters are
// never empty, so that those that touch are one run, also over empty ones between them.
template <int kThreads>
__device__ void write_runs(const SelectRuns& call, const List<kThreads>& list, int32_t number,
                           Shared& shared) {
  constexpr int kWords = 8;  // of a warp at the same time
  const RunLists& chosen = call.chosen;
  uint32_t* run_first = chosen.first + number * (chosen.capacity + 1);
  uint32_t* run_before = chosen.before + number * (chosen.capacity + 1);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t lanes_below = (1u << lane) - 1;
  uint2 written = make_uint2(0, 0);  // runs, keys
  uint32_t last_end = 0;             // of the chosen clusters so far; 0: there are none
  for (int32_t first = 0; first < list.words(); first += kThreads / 32 * kWords) {
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
      const uint32_t keys = scan_warp(ends[i] - begins[i]);
      const uint32_t run = place.x + __popc(starts[i] & lanes_below);
      const uint32_t first_key = place.y + keys - (ends[i] - begins[i]);
      if (starts[i] >> lane & 1) {
        run_first[run] = begins[i];
        run_before[run] = first_key;
      }
      place = make_uint2(place.x + __popc(starts[i]), place.y + __shfl_sync(kAll, keys, 31));
    }
  }
  if (threadIdx.x == 0) {
    run_before[written.x] = written.y;
    chosen.totals[number].runs = written.x;
    chosen.totals[number].keys = written.y;
    count(call, list, number, written.y);
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kSelectThreads / kThreads)
    select_kernel(const __grid_constant__ SelectRuns call) {
  begin_dependent();
  __shared__ Shared shared;
  extern __shared__ uint32_t chosen[];
  const int32_t number = blockIdx.x, kv_head = number % call.shape.kv_heads;
  const int2 block = block_of(call.blocks, number / call.shape.kv_heads);
  const int scope = block.y > 1 ? 1 : 0;
  const bool all = call.alive.totals == nullptr;
  List<kThreads> list;
  int64_t n = call.level.clusters;
  const uint32_t *offsets = call.level.offsets, *sizes = call.level.sizes;
  list.wanted = call.level.wanted[scope];
  list.threshold = call.level.log_threshold[scope] * 1.4426950408889634f;
  list.finest = call.level.finest;
  list.counters = call.counters;
  if (call.own != nullptr) {
    const LookupLayer& own = call.own[number / call.shape.kv_heads].lookup;
    if (call.depth >= own.levels) return;
    const LookupLevel& level = own.level[call.depth];
    n = level.clusters;
    offsets = level.offsets;
    sizes = level.sizes;
    list.wanted = own.wanted;
    list.threshold = level.threshold;
    list.finest = call.depth + 1 == own.levels;
    list.counters = own.counters;
  }
  list.count = static_cast<int32_t>(all ? n : call.alive.totals[number].keys);
  list.ids = all ? nullptr : call.ids + number * n;
  list.offsets = offsets + kv_head * (n + 1);
  list.sizes = !all               ? call.alive_sizes + number * n
               : sizes == nullptr ? nullptr
                                  : sizes + kv_head * n;
  list.scores = call.scores + number * call.stride;
  list.ranks = reinterpret_cast<uint32_t*>(list.scores);
  list.chosen = chosen;
  list.logarithms = call.level.greatest == nullptr;
  list.fault = (call.bits != nullptr ? call.faults[number] : call.chosen.totals[number].fault) != 0;
  if (list.fault) list.count = 0;
  shared.clear<kThreads>();
  __syncthreads();
  const int64_t tile_stride = gridDim.x * call.stride;
  uint32_t total, keys = call.tile_tokens > 0
                             ? rank_scores<true>(call, list, block, tile_stride, shared)
                             : rank_scores<false>(call, list, block, tile_stride, shared);
  if (list.wanted != nullptr && list.count > 0) {
    const uint32_t wanted = list.wanted[kv_head];
    shared.sum_before(keys, total);
    if (list.finest || total < wanted) keys = choose_by_budget(list, wanted, shared);
  }
  shared.sum_before(keys, total);  // and the bits are there
  if (call.bits == nullptr) return write_runs(call, list, number, shared);
  if (threadIdx.x == 0) count(call, list, number, total);
  const auto words = static_cast<int32_t>((call.stride + 31) / 32);
  for (int32_t i = threadIdx.x; i < words; i += kThreads) {
    call.bits[int64_t{number} * words + i] = i < list.words() ? chosen[i] : 0;
  }
}

// Runs of alive clusters to ids and sizes of each position, one warp a run.
__device__ void expand(const PrefillLookupParams& params, int64_t list) {
  const uint32_t* sizes = params.level.sizes + list % params.shape.kv_heads * params.level.clusters;
  const RunLists& alive = params.alive;
  const uint32_t* before = alive.before + list * (alive.capacity + 1);
  const uint32_t count = alive.totals[list].runs;
  for (uint32_t run = threadIdx.x / 32; run < count; run += kSelectThreads / 32) {
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

Status launch_prepare(const PrefillLookupParams& params, const Device& device,
                      cudaStream_t stream) {
  return launch_blocks(prepare_kernel, params.blocks.count * params.shape.kv_heads, kSelectThreads,
                       0, device, stream, params);
}

Status launch_select(const SelectRuns& call, const Device& device, cudaStream_t stream) {
  const size_t bits = static_cast<size_t>(call.level.clusters + 31) / 32 * sizeof(uint32_t);
  if (bits > kMostBits) {
    return {Code::kUnsupported, concat("selection on the GPU: ", call.level.clusters,
                                       " clusters, expected at most ", 8 * kMostBits)};
  }
  const int lists = call.blocks.count * call.shape.kv_heads;
  const bool few = lists < 2 * device.multiprocessors;
  return launch_blocks(few ? select_kernel<kSelectThreads> : select_kernel<kManyListThreads>, lists,
                       few ? kSelectThreads : kManyListThreads, static_cast<int64_t>(bits), device,
                       stream, call);
}

}  // namespace sqz::cuda
