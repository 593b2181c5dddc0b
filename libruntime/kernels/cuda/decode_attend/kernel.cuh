// Blocks share the keys of all pairs evenly: laid end to end, block b has keys [b W, (b + 1) W).
// The part of one pair that a block has is a segment; its 8 warps take tiles of 16 keys in turn,
// keys and values going from memory straight to registers. A pair cut into several segments is
// merged by the block that finishes last, in the order of the keys: the same bits whatever the
// timing.
#pragma once

#include "libruntime/kernels/cuda/common/cache_row.cuh"
#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode_attend/kernel.h"
#include "libruntime/kernels/cuda/decode_attend/shared.cuh"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"

namespace sqz::cuda {

template <class Element, int kDim, bool kCache>
class Attend {
 public:
  __device__ Attend(const AttendParams& params, AttendShared<kDim>& shared)
      : p_(params),
        s_(shared),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        pairs_(params.requests * params.kv_heads),
        exact_(params.exact - params.exact_skipped),
        queries_(params.q),
        listed_(params.lists.totals != nullptr) {}

  __device__ void run() {
    ptx::griddepcontrol_launch_dependents();
    fetch_queries();
    ptx::griddepcontrol_wait();
    count_keys();
    const int64_t total = s_.before[pairs_];
    const auto blocks = static_cast<int64_t>(gridDim.x);
    share_ = max(kLeastKeys, round_up((total + blocks - 1) / blocks));
    if (pairs_ <= blocks) choose_whole_blocks();
    int64_t at = blockIdx.x * share_;
    const int64_t end = min(at + share_, total);
    int pair = 0;
#pragma unroll 1
    for (int step = kMostPairs; step > 0 && whole_ == 0; step /= 2) {
      if (pair + step < pairs_ && s_.before[pair + step] <= at) pair += step;
    }
    Segment segment;
    bool more = whole_ > 0 ? own_pair(segment) : at < end;
#pragma unroll 1
    while (more) {
      if (whole_ == 0) at = shared_pair(pair++, at, end, segment);
      attend_segment(segment);
      more = whole_ == 0 && at < end;
    }
  }

 private:
  static constexpr int kHalves = (kDim + 63) / 64;  // of a value row: 64 dimensions each
  static constexpr int kTilesOut = kHalves * 8;     // of 8 dimensions
  static constexpr int64_t kRowBytes = kDim * 2;

  // What a block has of a pair, and where the parts of the pair are: the first by itself, the
  // others from the second on, two partials apart.
  struct Segment {
    int pair;
    int64_t begin, end;
    int parts;
    AttendPartial<kDim>*own, *first, *second;

    __device__ const AttendPartial<kDim>* part(int i) const {
      return i == 0 ? first : second + 2 * (i - 1);
    }
  };

  __device__ static int64_t round_up(int64_t keys) {
    return (keys + kTileKeys - 1) / kTileKeys * kTileKeys;
  }

  // A block that serves two pairs pays for another start and end. If giving every pair blocks of
  // its own, as many as it needs at `whole_` keys each, makes no block longer than that costs, do
  // so.
  __device__ void choose_whole_blocks() {
    constexpr int kTries = 32;
    constexpr int64_t kSwitchKeys = 320;  // that could be read in the time
    if (warp_ == 0) {
      // Lane i tries share_ + i / kTries of what it may be longer.
      const int64_t keys = round_up(share_ + kSwitchKeys * lane_ / (kTries - 1));
      int64_t blocks = 0;
#pragma unroll 1
      for (int pair = 0; pair < pairs_; ++pair) {
        blocks += static_cast<uint32_t>(s_.before[pair + 1] - s_.before[pair] + keys - 1) /
                  static_cast<uint32_t>(keys);
      }
      const unsigned fits = __ballot_sync(~0u, blocks <= gridDim.x);
      const int64_t least = __shfl_sync(~0u, keys, fits == 0 ? 0 : __ffs(fits) - 1);
      if (lane_ == 0) s_.whole = fits == 0 ? 0 : least;
    }
    __syncthreads();
    whole_ = s_.whole;
  }

  // The one pair that this block serves; false if there is none.
  __device__ bool own_pair(Segment& segment) {
    int first_block = 0;
#pragma unroll 1
    for (int pair = 0; pair < pairs_; ++pair) {
      const auto keys = static_cast<uint32_t>(s_.before[pair + 1] - s_.before[pair]);
      const auto most = static_cast<uint32_t>(whole_);
      const auto blocks = static_cast<int>((keys + most - 1) / most);
      const int block = static_cast<int>(blockIdx.x) - first_block;
      if (block < blocks) {
        // Evenly, not the last one short.
        const int64_t each = round_up((keys + blocks - 1) / static_cast<uint32_t>(blocks));
        segment = {.pair = pair,
                   .begin = min(block * each, int64_t{keys}),
                   .end = min((block + 1) * each, int64_t{keys}),
                   .parts = blocks,
                   .own = partial(blockIdx.x, 0),
                   .first = partial(first_block, 0),
                   .second = partial(first_block + 1, 0)};
        return true;
      }
      first_block += blocks;
    }
    return false;
  }

  // This block's keys of a pair, from `at` of all keys on; where they end.
  __device__ int64_t shared_pair(int pair, int64_t at, int64_t end, Segment& segment) {
    const int64_t first = s_.before[pair], last = s_.before[pair + 1];
    const int64_t first_block = first / share_, last_block = (last - 1) / share_;
    segment = {.pair = pair,
               .begin = at - first,
               .end = min(last, end) - first,
               .parts = static_cast<int>(last_block - first_block) + 1,
               .own = partial(blockIdx.x, first > blockIdx.x * share_ ? 1 : 0),
               .first = partial(first_block, first > first_block * share_ ? 1 : 0),
               .second = partial(first_block + 1, 0)};
    return min(last, end);
  }

  // A pair without keys counts as one, so that some block writes its result.
  __device__ void count_keys() {
    __shared__ int64_t warp_sums[kAttendWarps];
    int64_t before = 0;
#pragma unroll 1
    for (int tile = 0; tile < pairs_; tile += kAttendThreads) {
      const int pair = tile + thread_;
      const int64_t own = pair < pairs_ ? max(int64_t{1}, keys_of(pair)) : 0;
      int64_t scan = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int64_t up = __shfl_up_sync(~0u, scan, step);
        if (lane_ >= step) scan += up;
      }
      if (lane_ == 31) warp_sums[warp_] = scan;
      __syncthreads();
      int64_t all = 0;
      for (int w = 0; w < kAttendWarps; ++w) {
        if (w < warp_) scan += warp_sums[w];
        all += warp_sums[w];
      }
      if (pair < pairs_) s_.before[pair] = before + scan - own;
      before += all;
      __syncthreads();
    }
    if (thread_ == 0) {
      s_.before[pairs_] = before;
      if (!listed_ && blockIdx.x == 0 && p_.counters != nullptr) {
        atomicAdd(p_.counters, static_cast<unsigned long long>(p_.requests));
      }
    }
    __syncthreads();
  }

  __device__ int64_t keys_of(int pair) const {
    return exact_ + (listed_ ? p_.lists.totals[list_of(pair)].keys : p_.slots);
  }
  __device__ int list_of(int pair) const {
    return p_.lists.of_heads ? pair % p_.kv_heads : pair;
  }

  __device__ void attend_segment(const Segment& segment) {
    const int pair = segment.pair;
    head_ = pair % p_.kv_heads;
    load_queries(pair);
    maximum_ = kLowestMaximum;
    sum_ = 0;
#pragma unroll
    for (int i = 0; i < kTilesOut; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out_[i][j] = 0;
    }
    const int64_t count = min(segment.end, keys_of(pair));  // an empty pair has a segment, no keys
    const bool list = listed_ || kCache;
    const int64_t step = list ? kListKeys : segment.end - segment.begin;
    for (int64_t at = segment.begin; at < count; at += step) {
      const int64_t stop = min(at + step, count);
      if (at > segment.begin) __syncthreads();
      if (list) locate(pair, at, stop);
      __syncthreads();
      attend_keys(at, stop, list);
    }
    finish_segment(segment);
  }

  // All queries, while the lookup that this kernel waits for still runs: it began when they were
  // there, and no block of this kernel begins before.
  __device__ void fetch_queries() {
    const int64_t bytes = int64_t{pairs_} * p_.group * kDim * (p_.q_dtype == DType::kF32 ? 4 : 2);
    const bool aligned = reinterpret_cast<uintptr_t>(p_.q) % 16 == 0;
    if (!p_.after_lookup || bytes > kEarlyBytes || !aligned) return;
    for (int64_t i = thread_; i < bytes / 16; i += kAttendThreads) {
      s_.early[i] = __ldcg(static_cast<const uint4*>(p_.q) + i);
    }
    queries_ = s_.early;
  }

  __device__ void load_queries(int pair) {
    const int64_t first = static_cast<int64_t>(pair) * p_.group;
    make_query_rows<Element, kDim>(
        s_.queries, p_.group, thread_, kAttendThreads, [&](int row, int chunk, float(&x)[8]) {
          load_8(p_.q_dtype, queries_, (first + row) * kDim + chunk * 8, x);
#pragma unroll
          for (int i = 0; i < 8; ++i) x[i] *= p_.scale;
        });
  }

  // ---- Where keys are.

  // s_.list of keys [begin, end): slots, or exact keys with kExactKey; with a cache rows of it.
  __device__ void locate(int pair, int64_t begin, int64_t end) {
    const int64_t exact_end = min(end, exact_);
#pragma unroll 1
    for (int64_t k = begin + thread_; k < exact_end; k += kAttendThreads) {
      put(begin, k, exact_key(k));
    }
    if (end <= exact_) return;
    const auto first_key = static_cast<uint32_t>(max(begin, exact_) - exact_);
    const auto end_key = static_cast<uint32_t>(end - exact_);
    if (!listed_) {
#pragma unroll 1
      for (uint32_t key = first_key + thread_; key < end_key; key += kAttendThreads) {
        put(begin, exact_ + key, key);
      }
      return;
    }
    const RunLists& lists = p_.lists;
    const int list = list_of(pair);
    const uint32_t* first = lists.first + list * (lists.capacity + 1);
    const uint32_t* before = lists.before + list * (lists.capacity + 1);
    const uint32_t runs = lists.totals[list].runs;
    // Lane i of warp w has run 8 i + w of 256; a warp writes one run after the other.
    uint32_t run = lists.marks[list * lists.mark_capacity + first_key / kMarkKeys];
#pragma unroll 1
    for (run += warp_;; run += kAttendThreads) {
      const uint32_t own = run + lane_ * kAttendWarps;
      const uint32_t own_first = own < runs ? first[own] : 0;
      const uint32_t own_begin = own < runs ? before[own] : end_key;
      const uint32_t own_end = own < runs ? before[own + 1] : end_key;
#pragma unroll 1
      for (int i = 0; i < 32; ++i) {
        const uint32_t run_begin = __shfl_sync(~0u, own_begin, i);
        if (run_begin >= end_key) return;
        const uint32_t run_first = __shfl_sync(~0u, own_first, i);
        const uint32_t run_end = min(__shfl_sync(~0u, own_end, i), end_key);
#pragma unroll 1
        for (uint32_t key = max(run_begin, first_key) + lane_; key < run_end; key += 32) {
          put(begin, exact_ + key, run_first + (key - run_begin));
        }
      }
    }
  }

  __device__ void put(int64_t begin, int64_t key, uint32_t where) {
    s_.list[key - begin] = kCache ? row_in_cache(where) : where;
  }

  __device__ uint32_t row_in_cache(uint32_t where) const {
    return cache_row(p_.cache, (where & kExactKey) != 0
                                   ? exact_token(p_.cache, p_.exact, where & ~kExactKey)
                                   : int64_t{p_.cache.positions[head_ * p_.slots + where]});
  }

  __device__ uint32_t exact_key(int64_t key) const {
    return kExactKey | static_cast<uint32_t>(key + p_.exact_skipped);
  }
  // Bytes from the start of keys or values; of exact keys from the start of theirs.
  __device__ __forceinline__ const char* row_at(uint32_t where, const void* slots,
                                                const void* exact) const {
    if (kCache) {
      return static_cast<const char*>(slots) + cache_bytes(p_.cache, where, head_);
    }
    const bool is_exact = (where & kExactKey) != 0;
    const char* base = static_cast<const char*>(is_exact ? exact : slots);
    const int64_t row = head_ * (is_exact ? p_.exact : p_.slots) + (where & ~kExactKey);
    return base + row * kRowBytes;
  }

  // Row of a key, of `begin` + index; beyond the last key the last one's.
  __device__ __forceinline__ uint32_t where(int64_t begin, int64_t index, int64_t count,
                                            bool list) const {
    index = min(index, count - 1);
    if (list) return s_.list[index];
    const int64_t key = begin + index;
    return key < exact_ ? exact_key(key) : static_cast<uint32_t>(key - exact_);
  }

  // ---- The keys of a warp.

  struct Values {
    uint4 words[4][kHalves];  // of 4 keys
  };

  __device__ __forceinline__ void load_keys(int64_t begin, int64_t tile, int64_t count, bool list,
                                            RowPart<kDim> (&keys)[2]) const {
    const void* slots = kCache ? p_.cache.keys : p_.keys;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t at = where(begin, tile + 8 * t + lane_ / 4, count, list);
      keys[t].load(row_at(at, slots, p_.exact_keys), lane_);
    }
  }

  // Lane 4 n + t: dimensions [64 h + 8 n, + 8) of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
  __device__ __forceinline__ void load_values(int64_t begin, int64_t tile, int64_t count, bool list,
                                              Values& values) const {
    const void* slots = kCache ? p_.cache.values : p_.values;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t key = tile + 2 * (lane_ % 4) + i % 2 + i / 2 * 8;
      const char* row = row_at(where(begin, key, count, list), slots, p_.exact_values);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int byte = 128 * h + 16 * (lane_ / 4);
        const bool inside = kDim % 64 == 0 || byte < kRowBytes;
        values.words[i][h] = inside ? load_stream(row + byte) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ void attend_keys(int64_t begin, int64_t end, bool list) {
    const int64_t count = end - begin;
    constexpr int64_t kStep = kAttendWarps * kTileKeys;
    int64_t tile = warp_ * kTileKeys;
    if (tile >= count) return;
    RowPart<kDim> keys[2];
    load_keys(begin, tile, count, list, keys);
#pragma unroll 1
    for (; tile < count; tile += kStep) {
      Values values;
      load_values(begin, tile, count, list, values);
      float logits[2][4] = {};
      multiply_rows<Element, kDim, 2>(s_.queries, keys, lane_, logits);
      // Under way while this tile's softmax and values are worked on.
      if (tile + kStep < count) load_keys(begin, tile + kStep, count, list, keys);
      uint32_t weights[4];
      softmax(logits, count - tile, weights);
      add_values(weights, values);
    }
  }

  // Weights of the tile as the A side of a product: upper rows rounded, lower rows the rest.
  __device__ __forceinline__ void softmax(const float (&logits)[2][4], int64_t left,
                                          uint32_t (&weights)[4]) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * (i / 2) + 2 * (lane_ % 4) + i % 2;
      x[i] = key < left ? logits[i / 2][i % 2] + logits[i / 2][i % 2 + 2] : -INFINITY;
    }
    float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if (__any_sync(~0u, top > maximum_)) {
      const float grown = fmaxf(maximum_, top);
      const float factor = exp2f(maximum_ - grown);
      maximum_ = grown;
      sum_ *= factor;
#pragma unroll
      for (int i = 0; i < kTilesOut; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out_[i][j] *= factor;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = exp2f(x[i] - maximum_);
      sum_ += x[i];
    }
    split<Element>(x[0], x[1], weights[0], weights[1]);
    split<Element>(x[2], x[3], weights[2], weights[3]);
  }

  __device__ __forceinline__ void add_values(const uint32_t (&weights)[4], const Values& values) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const auto word = [&](int key) { return (&values.words[key][h].x)[w]; };
        // Pairs of keys of one dimension, from pairs of dimensions of one key.
        Element::mma(out_[8 * h + 2 * w], weights, __byte_perm(word(0), word(1), 0x5410),
                     __byte_perm(word(2), word(3), 0x5410));
        Element::mma(out_[8 * h + 2 * w + 1], weights, __byte_perm(word(0), word(1), 0x7632),
                     __byte_perm(word(2), word(3), 0x7632));
      }
    }
  }

  // ---- The end of a segment.
  __device__ AttendPartial<kDim>* partial(int64_t block, int which) const {
    auto* partials = reinterpret_cast<AttendPartial<kDim>*>(static_cast<char*>(p_.workspace) +
                                                            kMostPairs * sizeof(uint32_t));
    return partials + 2 * block + which;
  }

  __device__ void finish_segment(const Segment& segment) {
    merge_warps();
    if (segment.parts > 1 && !share_part(segment)) return;
    write_result(segment.pair, segment.parts > 1);
    __syncthreads();
  }

  // Leaves this block's part to others; true if they all did before and the pair is merged here.
  __device__ bool share_part(const Segment& segment) {
    AttendPartial<kDim>* own = segment.own;
#pragma unroll 1
    for (int i = thread_; i < p_.group * kDim; i += kAttendThreads) {
      own->values[i / kDim][i % kDim] = merged(i / kDim, i % kDim);
    }
    if (thread_ < p_.group) {
      own->maximum[thread_] = s_.total_maximum[thread_];
      own->sum[thread_] = s_.total_sum[thread_];
    }
    __threadfence();
    __syncthreads();
    if (thread_ == 0) {
      auto* arrived = static_cast<uint32_t*>(p_.workspace) + segment.pair;
      s_.last = atomicAdd(arrived, 1u) == static_cast<uint32_t>(segment.parts) - 1 ? 1 : 0;
      if (s_.last != 0) *arrived = 0;  // for the next launch
    }
    __syncthreads();
    const bool last = s_.last != 0;
    if (last) {
      __threadfence();
      merge_parts(segment);
    }
    __syncthreads();
    return last;
  }

  // The warps' states to s_.values, relative to one maximum.
  __device__ void merge_warps() {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) sum_ += __shfl_xor_sync(~0u, sum_, step);
    const int row = lane_ / 4;
    __syncthreads();  // the list has been read
    if (lane_ % 4 == 0) {
      s_.maximum[warp_][row] = maximum_;
      s_.sum[warp_][row] = sum_;
    }
    __syncthreads();
    float top = kLowestMaximum, sum = 0;
    for (int w = 0; w < kAttendWarps; ++w) top = fmaxf(top, s_.maximum[w][row]);
    for (int w = 0; w < kAttendWarps; ++w) sum += s_.sum[w][row] * exp2f(s_.maximum[w][row] - top);
    if (warp_ == 0 && lane_ % 4 == 0) {
      s_.total_maximum[row] = top;
      s_.total_sum[row] = sum;
    }
    const float factor = exp2f(maximum_ - top);
#pragma unroll
    for (int i = 0; i < kTilesOut; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int dim = 64 * (i / 8) + 8 * (2 * (lane_ % 4) + j) + i % 8;
        if (row < p_.group && dim < kDim) {
          s_.values[warp_][row][dim] = (out_[i][j] + out_[i][j + 2]) * factor;
        }
      }
    }
    __syncthreads();
  }

  __device__ float merged(int row, int dim) const {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) sum += s_.values[w][row][dim];
    return sum;
  }

  // Warp r weighs the parts of row r; then a thread adds up two neighbouring values over the parts,
  // kBatch of them under way.
  __device__ void merge_parts(const Segment& segment) {
    constexpr int kBatch = 18;
    float2 values[kBatch];
    load_parts(segment, thread_ * 2, 0, values);  // they come while the weights are worked out
    weigh_parts(segment);
    __syncthreads();
#pragma unroll 1
    for (int at = thread_ * 2; at < p_.group * kDim; at += 2 * kAttendThreads) {
      float2 sum = {};
#pragma unroll 1
      for (int first = 0; first < segment.parts; first += kBatch) {
        if (first > 0 || at != thread_ * 2) load_parts(segment, at, first, values);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i >= segment.parts) continue;
          const float weight = s_.weights[at / kDim][first + i];
          sum.x += values[i].x * weight;
          sum.y += values[i].y * weight;
        }
      }
      *reinterpret_cast<float2*>(&s_.values[0][at / kDim][at % kDim]) = sum;
    }
  }

  template <int kBatch>
  __device__ void load_parts(const Segment& segment, int at, int first,
                             float2 (&values)[kBatch]) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (at >= p_.group * kDim || first + i >= segment.parts) continue;
      values[i] = __ldcg(
          reinterpret_cast<const float2*>(&segment.part(first + i)->values[at / kDim][at % kDim]));
    }
  }

  __device__ void weigh_parts(const Segment& segment) {
    if (warp_ >= p_.group) return;
    float top = kLowestMaximum, sum = 0;
    const auto add = [&](float m, float l) {
      const float grown = fmaxf(top, m);
      sum = sum * exp2f(top - grown) + l * exp2f(m - grown);
      top = grown;
    };
#pragma unroll 1
    for (int i = lane_; i < segment.parts; i += 32) {
      const float m = __ldcg(&segment.part(i)->maximum[warp_]);
      s_.weights[warp_][i] = m;
      add(m, __ldcg(&segment.part(i)->sum[warp_]));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float m = __shfl_xor_sync(~0u, top, step), l = __shfl_xor_sync(~0u, sum, step);
      add(m, l);
    }
#pragma unroll 1
    for (int i = lane_; i < segment.parts; i += 32) {
      s_.weights[warp_][i] = exp2f(s_.weights[warp_][i] - top);
    }
    if (lane_ == 0) {
      s_.total_maximum[warp_] = top;
      s_.total_sum[warp_] = sum;
    }
  }

  // From the values of the warps or, if they are merged already, of the first.
  __device__ void write_result(int pair, bool is_merged) {
    const int64_t first = static_cast<int64_t>(pair) * p_.group;
    const bool fault = listed_ && p_.lists.totals[list_of(pair)].fault != 0;
    const auto value = [&](int row, int dim) {
      return is_merged ? s_.values[0][row][dim] : merged(row, dim);
    };
#pragma unroll 1
    for (int i = thread_; i < p_.group * kDim / 2; i += kAttendThreads) {
      const int row = i / (kDim / 2), dim = i % (kDim / 2) * 2;
      const float sum = s_.total_sum[row];
      const float inverse = fault ? NAN : sum == 0 ? 0 : 1 / sum;
      store_2(value(row, dim) * inverse, value(row, dim + 1) * inverse, (first + row) * kDim + dim);
    }
    if (thread_ < p_.group) {
      const float sum = s_.total_sum[thread_];
      const float lse = (s_.total_maximum[thread_] + log2f(sum)) * 0.6931471805599453f;
      p_.lse[first + thread_] = fault ? NAN : sum == 0 ? -INFINITY : lse;
    }
  }

  __device__ void store_2(float a, float b, int64_t at) const {
    if (p_.q_dtype == DType::kF32) {
      static_cast<float*>(p_.out)[at] = a;
      static_cast<float*>(p_.out)[at + 1] = b;
    } else {
      static_cast<uint32_t*>(p_.out)[at / 2] =
          p_.q_dtype == DType::kBF16 ? Bf16::pack(a, b) : F16::pack(a, b);
    }
  }

  const AttendParams& p_;
  AttendShared<kDim>& s_;
  const int thread_, lane_, warp_, pairs_;
  const int64_t exact_;  // exact keys that are attended
  const void* queries_;
  const bool listed_;
  int head_ = 0;
  int64_t share_ = 1;  // keys of a block
  int64_t whole_ = 0;  // at most, where every block serves one pair; 0: blocks may serve several
  float maximum_ = 0, sum_ = 0;  // of query row lane / 4; sum over this lane's keys
  float out_[kTilesOut][4];      // tile 8 h + j, column n: dimension 64 h + 8 n + j
};

}  // namespace sqz::cuda
