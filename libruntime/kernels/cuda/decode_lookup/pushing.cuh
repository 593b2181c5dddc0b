// Lookup for one token a request by the rules `threshold` and `budget`, where a slice of every
// level fits in shared memory: the fewest steps one after the other. Centroids are on their way to
// registers before the queries are there; blocks of a team push their sums to each other.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode_lookup/border.cuh"
#include "libruntime/kernels/cuda/decode_lookup/kernel.h"
#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"
#include "libruntime/kernels/cuda/decode_lookup/pushing_team.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"
#include "libruntime/kernels/cuda/ptx/prefetch.cuh"

namespace sqz::cuda {

inline constexpr int kPushingThreads = 512;
inline constexpr int kPushingWarps = kPushingThreads / 32;
inline constexpr int kMostOfThread = 32;  // clusters: a bit each

// Where teams of several blocks use PushingLookup, if there is room.
inline bool is_pushing(const LookupParams& params) {
  return params.device.has_clusters() && !params.pages && params.rule != LookupRule::kTop;
}

// At the beginning of a block's dynamic shared memory; what the rule `budget` needs, spans and
// logits of its slice follow.
template <int kDim>
struct PushingShared {
  QueryRows<kDim> queries;
  PushingTeamShared<kPushingThreads> team;
  float2 sums[kMostGroup][kPushingWarps];  // of the warps: maximum, and sum relative to it
  float lse[kMostGroup];
};

// Floats between the rows of logits of a slice: rows of a product fall on different banks.
__host__ __device__ constexpr int logit_stride(int slice) {
  return (slice + 31) / 32 * 32 + 8;
}

// Shared memory of a block for slices of `slice` clusters.
template <int kDim>
constexpr int64_t pushing_bytes(LookupRule rule, int team, int slice, int group) {
  return static_cast<int64_t>(sizeof(PushingShared<kDim>)) + border_bytes(rule, team) +
         int64_t{8} * slice + int64_t{4} * group * logit_stride(slice);
}

template <class Element, int kDim, LookupRule kRule>
class PushingLookup : private BorderSearch<kPushingThreads> {
 public:
  __device__ PushingLookup(const LookupParams& params, int team, int slice, char* memory)
      : BorderSearch(team, reinterpret_cast<PushingShared<kDim>*>(memory)->team,
                     memory + sizeof(PushingShared<kDim>)),
        p_(params),
        s_(*reinterpret_cast<PushingShared<kDim>*>(memory)),
        spans_(reinterpret_cast<uint2*>(memory + sizeof(PushingShared<kDim>) +
                                        border_bytes(kRule, team))),
        logits_(reinterpret_cast<float*>(spans_ + slice)),
        stride_(logit_stride(slice)),
        pair_(static_cast<int>(blockIdx.x) / team),
        head_(pair_ % params.kv_heads) {}

  __device__ void run() {
    begin_team();
    // Nothing of this depends on earlier kernels.
    Step steps[2];
    uint32_t wanted = 0;
    if (kRule == LookupRule::kBudget) {
      wanted = __ldg(p_.wanted + head_);
      clear_digits();
    }
    take_slice(p_.level[0].clusters);
    begin_level(p_.level[0], nullptr, steps);
    ask_ahead();
    ptx::griddepcontrol_wait();
    // Not before the queries are there: attention counts on it.
    ptx::griddepcontrol_launch_dependents();
    load_queries();
    await_team();
#pragma unroll 1
    for (int k = 0;; ++k) {
      const LookupLevel& level = p_.level[k];
      const uint32_t* alive = k == 0 ? nullptr : alive_list(k - 1);
      score(level, alive, steps);
      if (!add_up()) {
        if (rank_ == 0 && thread_ == 0) end_with_fault(p_, pair_);
        return;
      }
      const bool finest = k + 1 == p_.levels;
      const uint32_t chosen = choose(level, alive, finest, wanted);
      if (finest) {
        emit(chosen);
        return;
      }
      const uint32_t count = list_children(chosen, alive_list(k));
      take_slice(count);
      begin_level(p_.level[k + 1], alive_list(k), steps);
    }
  }

 private:
  static constexpr int kTiles = kDim > 128 ? 1 : kDim > 64 ? 2 : 4;  // of 8 rows, in a step
  static constexpr uint32_t kTileStride = 8 * kPushingWarps;         // rows between a warp's tiles
  static constexpr uint32_t kStride = kTiles * kTileStride;          // and between its steps

  // A step of a warp: centroids, and what the columns of their products stand for.
  struct Step {
    RowPart<kDim> rows[kTiles];
    float log_sizes[kTiles][2];
  };

  __device__ void take_slice(uint32_t count) {
    const uint32_t each = count / team_, more = count % team_, rank = rank_;
    begin_ = rank * each + min(rank, more);
    size_ = each + (rank < more ? 1 : 0);
    centroids_ += count;
  }
  __device__ uint32_t* alive_list(int level) const {
    return p_.alive + (static_cast<int64_t>(pair_) * 2 + level % 2) * p_.width;
  }
  // Of the slice's j-th.
  __device__ uint32_t cluster_of(const uint32_t* alive, uint32_t j) const {
    return alive == nullptr ? begin_ + j : __ldcg(alive + begin_ + j);
  }

  // ---- What is fetched.

  // The first two steps of a level, and where the children, or slots, of the slice's clusters begin
  // and end.
  __device__ void begin_level(const LookupLevel& level, const uint32_t* alive, Step (&steps)[2]) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint32_t at = 8 * warp_ + s * kStride;
      if (at < size_) load_step(level, alive, at, steps[s]);
    }
    const uint32_t* offsets = level.offsets + static_cast<int64_t>(head_) * (level.clusters + 1);
#pragma unroll 1
    for (uint32_t j = thread_; j < size_; j += kPushingThreads) {
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
    const auto* centroids = static_cast<const char*>(level.centroids) + first * kDim * 2;
    const float* sizes = level.log_sizes + first;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint32_t tile = at + t * kTileStride;
      const uint32_t row = cluster_of(alive, min(tile + lane_ / 4, size_ - 1));
      step.rows[t].load(centroids + static_cast<int64_t>(row) * kDim * 2, lane_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t j = min(tile + 2 * (lane_ % 4) + i, size_ - 1);
        step.log_sizes[t][i] = __ldg(sizes + cluster_of(alive, j));
      }
    }
  }

  // To the L2: the rest of the slice, and what is small of lower levels.
  __device__ void ask_ahead() const {
    const int64_t first = static_cast<int64_t>(head_) * p_.level[0].clusters + begin_;
    ask_for(p_.level[0].centroids, (first + 2 * kStride) * kDim * 2, (first + size_) * kDim * 2);
#pragma unroll 1
    for (int k = 0; k < p_.levels; ++k) {
      const LookupLevel& level = p_.level[k];
      const bool finest = k + 1 == p_.levels;
      if (kRule == LookupRule::kBudget && !finest) ask_for_share(level.sizes, level.clusters);
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
    for (int64_t at = begin + thread_ * 128; at < end; at += kPushingThreads * 128) {
      ptx::prefetch_l2(static_cast<const char*>(array) + at);
    }
  }

  __device__ void load_queries() {
    const int64_t first = static_cast<int64_t>(pair_) * p_.group;
    make_query_rows<Element, kDim>(s_.queries, p_.group, thread_, kPushingThreads,
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
  __device__ void score(const LookupLevel& level, const uint32_t* alive, Step (&steps)[2]) {
    maximum_ = kLowestLogit;
    sum_ = 0;
#pragma unroll 1
    for (uint32_t at = 8 * warp_; at < size_; at += 2 * kStride) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint32_t here = at + s * kStride, next = here + 2 * kStride;
        if (here >= size_) continue;
        float d[kTiles][4] = {};
        multiply_rows<Element, kDim, kTiles>(s_.queries, steps[s].rows, lane_, d);
        take_logits(here, steps[s].log_sizes, d);
        if (next < size_) load_step(level, alive, next, steps[s]);
      }
    }
    ptx::cp_async_wait_group<0>();  // whoever waits for the block's scores waits for spans_, too
  }

  // Query row lane / 4 and clusters 2 (lane % 4), + 1 of each tile.
  __device__ __forceinline__ void take_logits(uint32_t at, const float (&log_sizes)[kTiles][2],
                                              const float (&d)[kTiles][4]) {
    const int row = lane_ / 4;
    float y[kTiles][2], top = maximum_;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t j = at + t * kTileStride + 2 * (lane_ % 4) + i;
        const float x = d[t][i] + d[t][i + 2], log_size = log_sizes[t][i];
        const bool is = j < size_ && row < p_.group;
        if (is) logits_[row * stride_ + j] = log_size == -INFINITY ? -INFINITY : x;
        y[t][i] = is && log_size > -INFINITY ? x + log_size * 1.4426950408889634f : -INFINITY;
        top = fmaxf(top, y[t][i]);
      }
    }
    sum_ *= ptx::ex2_approx(maximum_ - top);
    maximum_ = top;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum_ += ptx::ex2_approx(y[t][i] - top);
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
    float2 own = make_float2(maximum_, sum_);
    add_sums<4>(own);
    if (lane_ % 4 == 0) s_.sums[lane_ / 4][warp_] = own;
    __syncthreads();
    if (warp_ < kMostGroup / 2) {
      // Half a warp a row: from the block's warps, and to the team's blocks.
      const int row = thread_ / kPushingWarps, at = thread_ % kPushingWarps;
      const uint2* told = shared_.told[turn()];
      own = s_.sums[row][at];
      add_sums<kPushingWarps>(own);
      if (at < team_) {
        tell(at, told + row * kMostTeam + rank_, __float_as_uint(own.x), __float_as_uint(own.y));
      }
      await_told(kMostGroup);
      float2 sums = make_float2(kLowestLogit, 0);
      if (at < team_) {
        const uint2 words = told[row * kMostTeam + at];
        sums = make_float2(__uint_as_float(words.x), __uint_as_float(words.y));
      }
      add_sums<kMostTeam>(sums);
      // Nothing alive: no logit will be compared with it.
      if (at == 0) s_.lse[row] = sums.y == 0 ? 0 : sums.x + __log2f(sums.y);
    }
    ++exchange_;
    __syncthreads();
    bool sound = true;
#pragma unroll 1
    for (int row = 0; row < p_.group; ++row) sound = sound && fabsf(s_.lse[row]) <= FLT_MAX;
    return sound;
  }
  static_assert(kPushingWarps == kMostTeam);

  // ---- What is chosen. Thread t has clusters [t each, (t + 1) each) of the slice, a bit for each.

  __device__ uint32_t each() const {
    return max(1u, (size_ + kPushingThreads - 1) / kPushingThreads);
  }

  // How many of these there are.
  __device__ uint32_t own_count() const {
    const uint32_t first = thread_ * each();
    return first < size_ ? min(each(), size_ - first) : 0;
  }

  __device__ uint32_t choose(const LookupLevel& level, const uint32_t* alive, bool finest,
                             uint32_t wanted) {
    if (kRule == LookupRule::kThreshold) return pass(level.threshold);
    const uint32_t first = thread_ * each();
    const auto keys = [&](uint32_t i) {
      if (finest) return spans_[first + i].y - spans_[first + i].x;
      return __ldg(level.sizes + static_cast<int64_t>(head_) * level.clusters +
                   cluster_of(alive, first + i));
    };
    if (!finest) {
      const uint32_t chosen = pass(level.threshold);
      Sums own, all;
#pragma unroll 1
      for (uint32_t left = chosen; left != 0; left &= left - 1) own.b += keys(__ffs(left) - 1);
      sums_before(own, all);
      if (all.b >= wanted) return chosen;
    }
    combine();
    return best(
        own_count(), wanted, finest, level.threshold,
        [&](uint32_t i) { return logits_[first + i]; }, keys);
  }

  // S, its mean or maximum over the rows, is compared with T as 2^(log2 S - log2 T) with 1: what
  // overflows is chosen, what underflows is far from it.
  __device__ uint32_t pass(float threshold) const {
    const uint32_t count = own_count(), first = thread_ * each();
    const int rows = p_.group;
    float least[kMostGroup];
#pragma unroll
    for (int r = 0; r < kMostGroup; ++r) least[r] = r < rows ? s_.lse[r] + threshold : 0;
    const float enough = p_.mean ? static_cast<float>(rows) : 1.0f;
    uint32_t chosen = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      const float* logits = logits_ + first + i;
      float sum = 0, top = 0;
#pragma unroll
      for (int r = 0; r < kMostGroup; ++r) {
        if (r >= rows) break;
        const float ratio = ptx::ex2_approx(logits[r * stride_] - least[r]);
        sum += ratio;
        top = fmaxf(top, ratio);
      }
      if ((p_.mean ? sum : top) >= enough) chosen |= 1u << i;
    }
    return chosen;
  }

  // log2 S, its mean or maximum over the rows, in the place of the first row's logit.
  __device__ void combine() {
    const uint32_t count = own_count(), first = thread_ * each();
    const int rows = p_.group;
    const float log_group = p_.mean ? __log2f(static_cast<float>(rows)) : 0;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      float* logits = logits_ + first + i;
      float y[kMostGroup], top = -INFINITY;
#pragma unroll
      for (int r = 0; r < kMostGroup; ++r) {
        y[r] = r < rows ? logits[r * stride_] - s_.lse[r] : -INFINITY;
        top = fmaxf(top, y[r]);
      }
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kMostGroup; ++r) sum += ptx::ex2_approx(y[r] - top);
      // Of an empty cluster all are -infinity.
      if (top > -INFINITY && p_.mean) top += __log2f(sum) - log_group;
      logits[0] = top;
    }
  }

  // Calls body(span) for every chosen cluster of this thread.
  template <class Body>
  __device__ void for_each(uint32_t chosen, const Body& body) const {
    const uint2* own = spans_ + thread_ * each();
#pragma unroll 1
    for (; chosen != 0; chosen &= chosen - 1) body(own[__ffs(chosen) - 1]);
  }

  // The children of what was chosen, for the next level; how many.
  __device__ uint32_t list_children(uint32_t chosen, uint32_t* list) {
    Sums own, all;
    for_each(chosen, [&](uint2 span) { own.b += span.y - span.x; });
    uint32_t at = sums_before(own, all).b;
    for_each(chosen, [&](uint2 span) {
#pragma unroll 1
      for (uint32_t child = span.x; child < span.y; ++child) list[at++] = child;
    });
    __syncwarp();
    ptx::barrier_cluster();
    return all.b;
  }

  // Chosen clusters as runs, that end at the latest where a warp's clusters end.
  __device__ void emit(uint32_t chosen) {
    // Where the clusters of the lane before end, if its last is chosen.
    uint32_t last = ~0u;
    for_each(chosen >> (each() - 1) << (each() - 1), [&](uint2 span) { last = span.y; });
    last = __shfl_up_sync(~0u, last, 1);
    if (lane_ == 0) last = ~0u;
    Sums own, all;
    uint32_t end = last;
    for_each(chosen, [&](uint2 span) {
      own.a += span.x != end ? 1 : 0;
      own.b += span.y - span.x;
      end = span.y;
    });
    const Sums before = sums_before(own, all);
    write_runs(chosen, last, before);
    if (rank_ == 0 && thread_ == 0) end_lists(p_, pair_, head_, all, centroids_);
  }

  // `at`: runs and keys before those of this thread.
  __device__ void write_runs(uint32_t chosen, uint32_t end, Sums at) const {
    const RunLists& lists = p_.lists;
    uint32_t* run_first = lists.first + pair_ * (lists.capacity + 1);
    uint32_t* run_before = lists.before + pair_ * (lists.capacity + 1);
    uint32_t* marks = lists.marks + pair_ * lists.mark_capacity;
    for_each(chosen, [&](uint2 span) {
      if (span.x != end) {
        run_first[at.a] = span.x;
        run_before[at.a++] = at.b;
      }
      end = span.y;
      const uint32_t keys = at.b + span.y - span.x;
#pragma unroll 1
      for (uint32_t m = (at.b + kMarkKeys - 1) / kMarkKeys; m * kMarkKeys < keys; ++m) {
        marks[m] = at.a - 1;
      }
      at.b = keys;
    });
  }

  const LookupParams& p_;
  PushingShared<kDim>& s_;
  uint2* const spans_;   // [slice]
  float* const logits_;  // [group][stride_]
  const int stride_, pair_, head_;
  uint32_t begin_ = 0, size_ = 0;  // of what is alive, this block's
  uint32_t centroids_ = 0;         // that were read to decide
  float maximum_ = 0, sum_ = 0;
};

}  // namespace sqz::cuda
