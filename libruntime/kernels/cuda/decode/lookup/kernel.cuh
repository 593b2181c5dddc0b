// Lookup for one token a request, all levels in one kernel: the fewest steps one after the other.
// A team of blocks serves a pair: it splits what is alive at a level, sends its members sums, and
// goes on together. Centroids are on their way to registers before the queries are there.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode/context_layer.cuh"
#include "libruntime/kernels/cuda/decode/lookup/choice.cuh"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"
#include "libruntime/kernels/cuda/decode/lookup/push_team.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"
#include "libruntime/kernels/cuda/ptx/prefetch.cuh"

namespace sqz::cuda {

inline constexpr int kMostOfThread = 32;  // clusters: a bit each

// At the beginning of a block's dynamic shared memory; what the rule that counts needs, spans and
// logits of its slice follow.
template <int kDim, int kRows>
struct LookupShared {
  QueryRows<kDim, kRows> queries;
  PushTeam::Shared team;
  float2 sums[kRows][kLookupWarps];  // of the warps: maximum, and sum relative to it
  float lse[kRows];
  // If the requests have layers of their own, of the pair:
  LookupLayer layer;
  const ContextLayer* named;  // null: there is none
};

// Floats between the rows of logits of a slice: rows of a product fall on different banks.
__host__ __device__ constexpr int logit_stride(int slice) {
  return (slice + 31) / 32 * 32 + 8;
}

template <int kDim, int kRows>
constexpr int64_t fixed_bytes(int team, bool budget) {
  return static_cast<int64_t>(sizeof(LookupShared<kDim, kRows>)) +
         (budget ? cutoff_bytes(team) : 0);
}
// Shared memory of a block for slices of `slice` clusters.
template <int kDim, int kRows>
constexpr int64_t lookup_bytes(int team, int slice, int group, bool budget) {
  return fixed_bytes<kDim, kRows>(team, budget) + int64_t{8} * slice +
         int64_t{4} * group * logit_stride(slice);
}

// kRows: query rows that a pair has at most. kBudget: the rule counts keys; else clusters are
// compared with a threshold. kOwn: the requests have layers of their own.
template <class Element, int kDim, int kRows, bool kBudget, bool kOwn>
class Lookup : private Choice {
  using Shared = LookupShared<kDim, kRows>;

 public:
  // `slice`: clusters that a block's shared memory has room for.
  __device__ Lookup(const LookupParams& params, int team, int slice, char* memory)
      : Choice(params, layer_of(params, memory), team, static_cast<int>(blockIdx.x) / team,
               reinterpret_cast<Shared*>(memory)->team, memory + sizeof(Shared)),
        s_(*reinterpret_cast<Shared*>(memory)),
        stride_(logit_stride(slice)) {
    spans_ = reinterpret_cast<uint2*>(memory + fixed_bytes<kDim, kRows>(team, kBudget));
    logits_ = reinterpret_cast<float*>(spans_ + slice);
  }

  __device__ void run() {
    begin_team();
    if constexpr (kOwn) {
      // If the GPU may not hold all teams at once, those without keys end before they fetch any.
      if (gridDim.x > static_cast<unsigned>(p_.device.multiprocessors)) {
        ptx::griddepcontrol_wait();
        if (!looks_up()) return;
      }
      find_own_layer();
    }
    Step steps[kSteps];
    uint32_t wanted = 0;
    // This runs again if a slot was filled anew meanwhile. Two calls would be two copies of it.
    bool waited = false;
#pragma unroll 1
    do {
      // This reads indexes alone, which no kernel writes.
      if (!kOwn || layer_.levels > 0) {
        if (kBudget) {
          wanted = __ldg(layer_.wanted + head_);
          clear_bins();
        }
        centroids_ = 0;
        take_slice(layer_.level[0].clusters);
        begin_level(layer_.level[0], nullptr, steps);
        ask_ahead();
      }
      if (waited) break;
      ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
      waited = true;
      if (kOwn && !looks_up()) return;
    } while (kOwn && !take_own_layer());
    load_queries();
    await_team();
#pragma unroll 1
    for (int k = 0;; ++k) {
      const LookupLevel& level = layer_.level[k];
      const uint32_t* alive = k == 0 ? nullptr : alive_list(k - 1);
      score(level, alive, steps);
      if (!add_up()) {
        if (rank_ == 0 && thread_ == 0) end_with_fault(p_, pair_);
        return;
      }
      const bool finest = k + 1 == layer_.levels;
      const uint32_t first = thread_ * each();
      const ChosenBits chosen = choose(
          kBudget, level, alive, finest, wanted, Window::around(level.threshold),
          [&] { return pass(level.threshold); }, [&] { combine(); },
          [&](uint32_t i) { return logits_[first + i]; });
      if (finest) {
        const uint32_t keys = emit(chosen);
        if constexpr (kOwn) fetch_rows(chosen, keys);
        return;
      }
      const uint32_t count = list_children(chosen, alive_list(k));
      take_slice(count);
      begin_level(layer_.level[k + 1], alive_list(k), steps);
    }
  }

 private:
  // Tiles of 8 rows in a step.
  static constexpr int kTiles = kDim > 128 ? 1 : kDim > 64 ? 2 : 4;
  static constexpr int kParts = kRows / 8;                   // of the rows: a lane has one of each
  static constexpr int kSteps = 2;                           // of a warp, under way
  static constexpr uint32_t kTileStride = 8 * kLookupWarps;  // rows between a warp's tiles
  static constexpr uint32_t kStride = kTiles * kTileStride;  // and between its steps

  // A step of a warp: centroids, and what the columns of their products stand for.
  struct Step {
    RowPart<kDim> rows[kTiles];
    float log_sizes[kTiles][2];
  };

  __device__ static const LookupLayer& layer_of(const LookupParams& params, char* memory) {
    if constexpr (kOwn) return reinterpret_cast<Shared*>(memory)->layer;
    return params;
  }
  // The layer that the pair's request names. An empty slot has no levels.
  __device__ void find_own_layer() {
    // One thread reads the slot, which may be filled meanwhile.
    if (thread_ == 0) {
      s_.named = layer_named(p_.named, p_.named.contexts[pair_ / p_.kv_heads]);
    }
    __syncthreads();
    if (s_.named != nullptr) {
      copy_layer(s_.named->lookup, s_.layer);
    } else if (thread_ == 0) {
      s_.layer.levels = 0;
    }
    __syncthreads();
  }
  // The request's layer, once the launch before this one has made it.
  __device__ const ContextLayer& own_layer() const {
    return p_.own[pair_ / p_.kv_heads];
  }
  __device__ bool looks_up() const {
    if (own_layer().lookup.levels > 0) return true;
    if (rank_ == 0 && thread_ == 0) list_whole(own_layer(), p_.lists, pair_, head_);
    ptx::cp_async_wait_group<0>();  // nothing is under way when the block ends
    return false;
  }
  // Takes over how many exact keys the request reads. False: its slot was filled anew since
  // find_own_layer(), and the new layer is there to begin with.
  __device__ bool take_own_layer() {
    const LookupLayer& own = own_layer().lookup;
    const bool same = s_.layer.levels > 0 && own.counters == s_.layer.counters;
    if (!same) ptx::cp_async_wait_group<0>();  // else the old layer's spans may come last
    __syncthreads();
    if (!same) {
      copy_layer(own, s_.layer);
      __syncthreads();
    } else if (thread_ == 0) {
      s_.layer.exact = own.exact;
    }
    return same;
  }

  __device__ void take_slice(uint32_t count) {
    const uint32_t each = count / team_, more = count % team_, rank = rank_;
    begin_ = rank * each + min(rank, more);
    size_ = each + (rank < more ? 1 : 0);
    centroids_ += count;
  }
  __device__ uint32_t* alive_list(int level) const {
    return p_.alive + (static_cast<int64_t>(pair_) * 2 + level % 2) * p_.width;
  }

  // ---- What is fetched.

  // The first steps of a level, and where the children, or slots, of the slice's clusters begin
  // and end.
  __device__ void begin_level(const LookupLevel& level, const uint32_t* alive,
                              Step (&steps)[kSteps]) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t at = 8 * warp_ + s * kStride;
      if (at < size_) load_step(level, alive, at, steps[s]);
    }
    const uint32_t* offsets = level.offsets + static_cast<int64_t>(head_) * (level.clusters + 1);
#pragma unroll 1
    for (uint32_t j = thread_; j < size_; j += kLookupThreads) {
      const uint32_t* from = offsets + cluster_of(alive, j);
      const uint32_t to = ptx::shared_address(spans_ + j);
      ptx::cp_async_4(to, from);
      ptx::cp_async_4(to + 4, from + 1);
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void load_step(const LookupLevel& level, const uint32_t* alive,
                                            uint32_t at, Step& step) const {
    const int64_t first = static_cast<int64_t>(head_) * level.clusters;
    const auto* rows = static_cast<const char*>(level.centroids) + first * kDim * 2;
    const float* sizes = level.log_sizes + first;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint32_t tile = at + t * kTileStride;
      const uint32_t row = cluster_of(alive, min(tile + lane_ / 4, size_ - 1));
      step.rows[t].load(rows + static_cast<int64_t>(row) * kDim * 2, lane_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t j = min(tile + 2 * (lane_ % 4) + i, size_ - 1);
        step.log_sizes[t][i] = __ldg(sizes + cluster_of(alive, j));
      }
    }
  }

  // To the L2: the rest of the slice, and what is small of lower levels.
  __device__ void ask_ahead() const {
    const int64_t first = static_cast<int64_t>(head_) * layer_.level[0].clusters + begin_;
    const int64_t begin = (first + kSteps * kStride) * kDim * 2, end = (first + size_) * kDim * 2;
    ask_for(layer_.level[0].centroids, begin, end);
#pragma unroll 1
    for (int k = 0; k < layer_.levels; ++k) {
      const LookupLevel& level = layer_.level[k];
      const bool finest = k + 1 == layer_.levels;
      if (kBudget && !finest) ask_for_share(level.sizes, level.clusters);
      if (k == 0) continue;
      ask_for_share(level.offsets, level.clusters + 1);
      ask_for_share(level.log_sizes, level.clusters);
    }
  }
  // This block's share of the `count` words of the head.
  __device__ void ask_for_share(const void* array, int count) const {
    const int64_t first = static_cast<int64_t>(head_) * count, share = count / team_ + 1;
    const int64_t begin = first + rank_ * share;
    ask_for(array, begin * 4, min(begin + share, first + count) * 4);
  }
  // Bytes [begin, end) of an array.
  __device__ void ask_for(const void* array, int64_t begin, int64_t end) const {
#pragma unroll 1
    for (int64_t at = begin + thread_ * 128; at < end; at += kLookupThreads * 128) {
      ptx::prefetch_l2(static_cast<const char*>(array) + at);
    }
  }

  __device__ void load_queries() {
    const int64_t first = static_cast<int64_t>(pair_) * p_.group;
    make_query_rows<Element>(s_.queries, p_.group, thread_, kLookupThreads,
                             [&](int row, int chunk, float(&x)[8]) {
                               load_8(p_.q_dtype, p_.q, (first + row) * kDim + chunk * 8, x);
#pragma unroll
                               for (int i = 0; i < 8; ++i) x[i] *= p_.scale;
                             });
    __syncthreads();
  }

  // ---- Scores.

  // Logits of the slice to memory, -infinity for empty clusters; the log-sum-exp of clusters, a
  // lane's share of it.
  __device__ void score(const LookupLevel& level, const uint32_t* alive, Step (&steps)[kSteps]) {
#pragma unroll
    for (float2& own : sums_) own = make_float2(kLowestLogit, 0);
#pragma unroll 1
    for (uint32_t at = 8 * warp_; at < size_; at += kSteps * kStride) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t here = at + s * kStride, next = here + kSteps * kStride;
        if (here >= size_) continue;
        float d[kTiles][4] = {};
        multiply_rows<Element>(s_.queries, steps[s].rows, lane_, d);
        take_logits(here, steps[s].log_sizes, d);
        if (next < size_) load_step(level, alive, next, steps[s]);
      }
    }
    ptx::cp_async_wait_group<0>();  // whoever waits for the block's scores waits for spans_, too
  }

  // Query rows lane / 4 + 8 part and clusters 2 (lane % 4), + 1 of each tile.
  __device__ __forceinline__ void take_logits(uint32_t at, const float (&log_sizes)[kTiles][2],
                                              const float (&d)[kTiles][4]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int row = lane_ / 4 + 8 * part;
      float2& own = sums_[part];  // maximum, and sum relative to it
      float y[kTiles][2], top = own.x;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t j = at + t * kTileStride + 2 * (lane_ % 4) + i;
          const float x = product_of<kRows>(d[t], part, i), log_size = log_sizes[t][i];
          const bool is = j < size_ && row < p_.group;
          if (is) logits_[row * stride_ + j] = log_size == -INFINITY ? -INFINITY : x;
          const bool counts = is && log_size > -INFINITY;
          y[t][i] = counts ? sound(x) + log_size * 1.4426950408889634f : -INFINITY;
          top = fmaxf(top, y[t][i]);
        }
      }
      own.y *= ptx::ex2_approx(own.x - top);
      own.x = top;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) own.y += ptx::ex2_approx(y[t][i] - top);
      }
    }
  }

  // The sums of kLanes neighbouring lanes, into each: the same bits. What is NaN or infinite shows
  // in the sum.
  template <int kLanes>
  __device__ static void add_sums(float2& own) {
    float top = own.x;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    own.y *= ptx::ex2_approx(own.x - top);
    own.x = top;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) own.y += __shfl_xor_sync(~0u, own.y, step);
  }

  // s_.lse over the team; false if one is NaN or infinite.
  __device__ bool add_up() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      add_sums<4>(sums_[part]);
      if (lane_ % 4 == 0) s_.sums[lane_ / 4 + 8 * part][warp_] = sums_[part];
    }
    __syncthreads();
    // Half a warp a row: from the block's warps, and to the team's blocks.
    const int row = thread_ / kLookupWarps, at = thread_ % kLookupWarps;
    const bool adds = warp_ < kRows / 2;
    if (adds) {
      float2 own = s_.sums[row][at];
      add_sums<kLookupWarps>(own);
      if (at < team_) send(at, row, __float_as_uint(own.x), __float_as_uint(own.y));
    }
    await_received(kRows, adds);
    if (adds) {
      float2 sums = make_float2(kLowestLogit, 0);
      if (at < team_) {
        const uint2 words = received(at, row);
        sums = make_float2(__uint_as_float(words.x), __uint_as_float(words.y));
      }
      add_sums<kMostTeam>(sums);
      // Nothing alive: no logit will be compared with it.
      if (at == 0) s_.lse[row] = sums.y == 0 ? 0 : sums.x + __log2f(sums.y);
    }
    end_exchange();
    __syncthreads();
    bool sound = true;
#pragma unroll 1
    for (int row = 0; row < p_.group; ++row) sound = sound && fabsf(s_.lse[row]) <= FLT_MAX;
    return sound;
  }
  static_assert(kLookupWarps == kMostTeam);

  // ---- What is chosen.

  // S, the mean over the rows, is compared with T as 2^(log2 S - log2 T) with 1. A ratio that
  // overflows is chosen, and one that underflows is far below.
  __device__ ChosenBits pass(float threshold) const {
    const uint32_t count = own_count(), first = thread_ * each();
    const int rows = p_.group;
    float least[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) least[r] = r < rows ? s_.lse[r] + threshold : 0;
    ChosenBits chosen;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      const float* logits = logits_ + first + i;
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) break;
        sum += ptx::ex2_approx(logits[r * stride_] - least[r]);
      }
      chosen.set(i, sum >= static_cast<float>(rows));
    }
    return chosen;
  }

  // Puts log2 S, the mean over the rows, in the place of the first row's logit.
  __device__ void combine() {
    const uint32_t count = own_count(), first = thread_ * each();
    const int rows = p_.group;
    const float log_group = __log2f(static_cast<float>(rows));
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      float* logits = logits_ + first + i;
      float y[kRows], top = -INFINITY;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        y[r] = r < rows ? logits[r * stride_] - s_.lse[r] : -INFINITY;
        top = fmaxf(top, y[r]);
      }
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum += ptx::ex2_approx(y[r] - top);
      // All logits of an empty cluster are -infinity.
      if (top > -INFINITY) top += __log2f(sum) - log_group;
      logits[0] = top;
    }
  }

  // ---- What attention will read.

  // Teams with fewer clusters end earlier. Meanwhile a part of what they chose is fetched into the
  // L2: each n-th cluster, so that all pairs ask for about kFetchedBytes. Attention to rows of 8
  // bits gains nothing by that.
  __device__ void fetch_rows(const ChosenBits& chosen, uint32_t keys) const {
    constexpr int64_t kRowBytes = kDim * 2, kFetchedBytes = 16 << 20;
    const AttendLayer& layer = own_layer().keys;
    if (layer.coded.keys.bits > 0) return;
    const int64_t all = 2 * kRowBytes * keys * (gridDim.x / team_);
    const auto n = static_cast<uint32_t>(all / kFetchedBytes + 1);
    const uint32_t first = thread_ * each();
    chosen.for_each([&](uint32_t i) {
      if ((first + i) % n != 0) return;
      const uint2 span = spans_[first + i];
      const int64_t at = (head_ * layer.slots + span.x) * kRowBytes;
      const auto bytes = static_cast<uint32_t>((span.y - span.x) * kRowBytes);
      ptx::cp_async_bulk_prefetch_l2(static_cast<const char*>(layer.keys) + at, bytes);
      ptx::cp_async_bulk_prefetch_l2(static_cast<const char*>(layer.values) + at, bytes);
    });
  }

  Shared& s_;
  float* logits_;  // [group][stride_] of the slice, in shared memory
  const int stride_;
  float2 sums_[kParts];  // maximum, and sum relative to it
};

}  // namespace sqz::cuda
