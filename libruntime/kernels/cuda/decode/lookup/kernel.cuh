// Lookup for one token a request, all levels in one kernel: the fewest steps one after the other.
// A team of blocks serves a pair: it splits what is alive at a level, sends its members sums, and
// goes on together. Centroids are on their way to registers before the queries are there.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode/lookup/choice.cuh"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"
#include "libruntime/kernels/cuda/decode/lookup/parts.cuh"
#include "libruntime/kernels/cuda/decode/lookup/push_team.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"
#include "libruntime/kernels/cuda/ptx/prefetch.cuh"

namespace sqz::cuda {

inline constexpr int kLookupThreads = 512;
inline constexpr int kLookupWarps = kLookupThreads / 32;
inline constexpr int kMostOfThread = 32;  // clusters: a bit each

// The first two, for clusters by their rule, push: on GPUs with clusters of blocks, where a slice
// of every level fits in shared memory. The others serve every rule anywhere.
enum class LookupKind { kThreshold, kBudget, kAny, kPages };

constexpr bool pushes(LookupKind kind) {
  return kind == LookupKind::kThreshold || kind == LookupKind::kBudget;
}
template <LookupKind kKind>
using TeamOf =
    std::conditional_t<pushes(kKind), PushTeam<kLookupThreads>, PullTeam<kLookupThreads>>;

// At the beginning of a block's dynamic shared memory; what rules that count need and, if there is
// room, spans, logits and (unless it pushes) what is chosen of its slice follow.
template <int kDim, LookupKind kKind>
struct LookupShared {
  QueryRows<kDim> queries[kKind == LookupKind::kPages ? 2 : 1];  // pages: positive, negative parts
  typename TeamOf<kKind>::Shared team;
  float2 sums[kMostGroup][kLookupWarps];  // of the warps: maximum, and sum relative to it
  float lse[kMostGroup];
};

// Floats between the rows of logits of a slice: rows of a product fall on different banks.
__host__ __device__ constexpr int logit_stride(int slice) {
  return (slice + 31) / 32 * 32 + 8;
}

template <int kDim, LookupKind kKind>
constexpr int64_t fixed_bytes(int team) {
  return static_cast<int64_t>(sizeof(LookupShared<kDim, kKind>)) +
         (kKind == LookupKind::kThreshold ? 0 : cutoff_bytes<TeamOf<kKind>>(team));
}
// Shared memory of a block for slices of `slice` clusters.
template <int kDim, LookupKind kKind>
constexpr int64_t lookup_bytes(int team, int slice, int group) {
  return fixed_bytes<kDim, kKind>(team) + int64_t{pushes(kKind) ? 8 : 12} * slice +
         int64_t{4} * group * logit_stride(slice);
}

template <class Element, int kDim, LookupKind kKind>
class Lookup : private Choice<TeamOf<kKind>, pushes(kKind)> {
  using Base = Choice<TeamOf<kKind>, pushes(kKind)>;
  using Shared = LookupShared<kDim, kKind>;
  using Base::p_, Base::pair_, Base::head_, Base::spans_, Base::words_, Base::begin_, Base::size_;
  using Base::team_, Base::rank_, Base::thread_, Base::lane_, Base::warp_;
  using typename Base::Chosen, typename Base::Window;
  static constexpr bool kPages = kKind == LookupKind::kPages, kPushes = pushes(kKind);

 public:
  // `slice`: clusters that a block's shared memory has room for; 0: it has none.
  __device__ Lookup(const LookupParams& params, int team, int slice, char* memory)
      : Base(params, team, static_cast<int>(blockIdx.x) / team,
             reinterpret_cast<Shared*>(memory)->team, memory + sizeof(Shared)),
        s_(*reinterpret_cast<Shared*>(memory)),
        stride_(kPushes || slice > 0 ? logit_stride(slice) : static_cast<int>(params.width)) {
    if (!kPushes && slice == 0) return;
    spans_ = reinterpret_cast<uint2*>(memory + fixed_bytes<kDim, kKind>(team));
    logits_ = reinterpret_cast<float*>(spans_ + slice);
    if (!kPushes) words_ = reinterpret_cast<uint32_t*>(logits_ + params.group * stride_);
  }

  __device__ void run() {
    look_up();
    this->leave_team();
  }

 private:
  __device__ void look_up() {
    this->begin_team();
    // Nothing of this depends on earlier kernels.
    Step steps[kSteps];
    uint32_t wanted = 0;
    if (rule() != LookupRule::kThreshold) {
      wanted = __ldg(p_.wanted + head_);
      this->clear_bins();
    }
    take_slice(p_.level[0].clusters);
    begin_level(p_.level[0], nullptr, steps);
    ask_ahead();
    ptx::griddepcontrol_wait();
    // Not before the queries are there: attention counts on it.
    ptx::griddepcontrol_launch_dependents();
    load_queries();
    this->await_team();
#pragma unroll 1
    for (int k = 0;; ++k) {
      const LookupLevel& level = p_.level[k];
      const uint32_t* alive = k == 0 ? nullptr : alive_list(k - 1);
      score(level, alive, steps);
      if (!(kPages ? bound() : add_up())) {
        if (rank_ == 0 && thread_ == 0) end_with_fault(p_, pair_);
        return;
      }
      const bool finest = k + 1 == p_.levels;
      const uint32_t first = thread_ * this->each();
      const Chosen chosen = this->choose(
          rule(), level, alive, finest, wanted,
          kPages ? Window::everything() : Window::around(level.threshold),
          [&] { return pass(level.threshold); },
          [&] {
            if (!kPages) combine();
          },
          [&](uint32_t i) { return logits_[first + i]; });
      if (finest) {
        this->emit(chosen, level, alive);
        return;
      }
      const uint32_t count = this->list_children(chosen, level, alive, alive_list(k));
      take_slice(count);
      begin_level(p_.level[k + 1], alive_list(k), steps);
    }
  }

  __device__ LookupRule rule() const {
    return kKind == LookupKind::kThreshold ? LookupRule::kThreshold
           : kKind == LookupKind::kBudget  ? LookupRule::kBudget
                                           : p_.rule;
  }

  // Of 8 rows, in a step.
  static constexpr int kTiles = kPages || kDim > 128 ? 1 : kDim > 64 ? 2 : 4;
  static constexpr int kSteps = kPages && kDim > 128 ? 1 : 2;  // of a warp, under way
  static constexpr uint32_t kTileStride = 8 * kLookupWarps;    // rows between a warp's tiles
  static constexpr uint32_t kStride = kTiles * kTileStride;    // and between its steps

  // A step of a warp: centroids, and what the columns of their products stand for; of pages their
  // greatest keys and their least.
  struct Step {
    RowPart<kDim> rows[kTiles], least[kPages ? kTiles : 1];
    float log_sizes[kTiles][2];
  };

  __device__ void take_slice(uint32_t count) {
    const uint32_t each = count / team_, more = count % team_, rank = rank_;
    begin_ = rank * each + min(rank, more);
    size_ = each + (rank < more ? 1 : 0);
    this->centroids_ += kPages ? 2 * count : count;
    if (kPushes || spans_ != nullptr) return;
    logits_ = p_.logits + static_cast<int64_t>(pair_) * (p_.group + 1) * p_.width + begin_;
    words_ = reinterpret_cast<uint32_t*>(logits_ + p_.group * p_.width);
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
    if (!kPushes && spans_ == nullptr) return;
    const uint32_t* offsets = level.offsets + static_cast<int64_t>(head_) * (level.clusters + 1);
#pragma unroll 1
    for (uint32_t j = thread_; j < size_; j += kLookupThreads) {
      const uint32_t* from = offsets + this->cluster_of(alive, j);
      const uint32_t to = ptx::shared_address(spans_ + j);
      ptx::cp_async_4(to, from);
      ptx::cp_async_4(to + 4, from + 1);
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void load_step(const LookupLevel& level, const uint32_t* alive,
                                            uint32_t at, Step& step) const {
    const int64_t first = static_cast<int64_t>(head_) * level.clusters;
    const auto rows_of = [&](const void* centroids, uint32_t row) {
      return static_cast<const char*>(centroids) + (first + row) * kDim * 2;
    };
    const float* sizes = level.log_sizes + first;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint32_t tile = at + t * kTileStride;
      const uint32_t row = this->cluster_of(alive, min(tile + lane_ / 4, size_ - 1));
      step.rows[t].load(rows_of(kPages ? level.greatest : level.centroids, row), lane_);
      if constexpr (kPages) {
        step.least[t].load(rows_of(level.centroids, row), lane_);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t j = min(tile + 2 * (lane_ % 4) + i, size_ - 1);
          step.log_sizes[t][i] = __ldg(sizes + this->cluster_of(alive, j));
        }
      }
    }
  }

  // To the L2: the rest of the slice, and what is small of lower levels.
  __device__ void ask_ahead() const {
    const int64_t first = static_cast<int64_t>(head_) * p_.level[0].clusters + begin_;
    const int64_t begin = (first + kSteps * kStride) * kDim * 2, end = (first + size_) * kDim * 2;
    ask_for(p_.level[0].centroids, begin, end);
    if (kPages) ask_for(p_.level[0].greatest, begin, end);
#pragma unroll 1
    for (int k = 0; k < p_.levels; ++k) {
      const LookupLevel& level = p_.level[k];
      const bool finest = k + 1 == p_.levels;
      if (rule() != LookupRule::kThreshold && !finest) ask_for_share(level.sizes, level.clusters);
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
    const auto load = [&](int row, int chunk, float(&x)[8]) {
      load_8(p_.q_dtype, p_.q, (first + row) * kDim + chunk * 8, x);
    };
    if constexpr (kPages) {
      // The bound of a page is linear in the positive and negative parts of a query, so that the
      // mean over queries is the bound of their mean parts.
      for (int part = 0; part < 2; ++part) {
        make_query_rows<Element, kDim>(
            s_.queries[part], rows(), thread_, kLookupThreads, [&](int, int chunk, float(&x)[8]) {
              for (int r = 0; r < p_.group; ++r) {
                float y[8];
                load(r, chunk, y);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                  const float z = part == 0 ? fmaxf(y[i], 0.0f) : fminf(y[i], 0.0f);
                  // fmaxf and fminf drop NaN; a bound must not.
                  x[i] += (y[i] == y[i] ? z : y[i]) / static_cast<float>(p_.group);
                }
              }
            });
      }
    } else {
      make_query_rows<Element, kDim>(s_.queries[0], p_.group, thread_, kLookupThreads,
                                     [&](int row, int chunk, float(&x)[8]) {
                                       load(row, chunk, x);
#pragma unroll
                                       for (int i = 0; i < 8; ++i) x[i] *= p_.scale;
                                     });
    }
    __syncthreads();
  }
  // Of logits.
  __device__ int rows() const {
    return kPages ? 1 : p_.group;
  }

  // ---- Scores.

  // Logits of the slice to memory, -infinity for empty clusters; the log-sum-exp of clusters, a
  // lane's share of it.
  __device__ void score(const LookupLevel& level, const uint32_t* alive, Step (&steps)[kSteps]) {
    maximum_ = kLowestLogit;
    sum_ = 0;
#pragma unroll 1
    for (uint32_t at = 8 * warp_; at < size_; at += kSteps * kStride) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t here = at + s * kStride, next = here + kSteps * kStride;
        if (here >= size_) continue;
        float d[kTiles][4] = {};
        multiply_rows<Element, kDim, kTiles>(s_.queries[0], steps[s].rows, lane_, d);
        if constexpr (kPages) {
          multiply_rows<Element, kDim, kTiles>(s_.queries[1], steps[s].least, lane_, d);
        }
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
        const float x = d[t][i] + d[t][i + 2], log_size = kPages ? 0 : log_sizes[t][i];
        const bool is = j < size_ && row < rows();
        if (is) logits_[row * stride_ + j] = log_size == -INFINITY ? -INFINITY : x;
        y[t][i] = is && log_size > -INFINITY ? x + log_size * 1.4426950408889634f : -INFINITY;
        top = fmaxf(top, y[t][i]);
      }
    }
    if (kPages) return;
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
    // Half a warp a row: from the block's warps, and to the team's blocks.
    const int row = thread_ / kLookupWarps, at = thread_ % kLookupWarps;
    const bool adds = warp_ < kMostGroup / 2;
    if (adds) {
      own = s_.sums[row][at];
      add_sums<kLookupWarps>(own);
      if (at < team_) this->send(at, row, __float_as_uint(own.x), __float_as_uint(own.y));
    }
    this->await_received(kMostGroup, adds);
    if (adds) {
      float2 sums = make_float2(kLowestLogit, 0);
      if (at < team_) {
        const uint2 words = this->received(at, row);
        sums = make_float2(__uint_as_float(words.x), __uint_as_float(words.y));
      }
      add_sums<kMostTeam>(sums);
      // Nothing alive: no logit will be compared with it.
      if (at == 0) s_.lse[row] = sums.y == 0 ? 0 : sums.x + __log2f(sums.y);
    }
    this->end_exchange();
    __syncthreads();
    bool sound = true;
#pragma unroll 1
    for (int row = 0; row < p_.group; ++row) sound = sound && fabsf(s_.lse[row]) <= FLT_MAX;
    return sound;
  }
  static_assert(kLookupWarps == kMostTeam);

  // Pages: the greatest bound over the rows, in the place of the first row's; false if one is NaN
  // or infinite.
  __device__ bool bound() {
    __syncthreads();
    const uint32_t count = this->own_count(), first = thread_ * this->each();
    bool sound = true;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      float* bounds = logits_ + first + i;
      float top = -INFINITY;
      for (int r = 0; r < rows(); ++r) {
        const float x = bounds[r * stride_];
        sound = sound && fabsf(x) <= FLT_MAX;
        top = fmaxf(top, x);
      }
      bounds[0] = top;
    }
    Sums all;
    this->sums_before({sound ? 0u : 1u, 0}, all);
    return all.a == 0;
  }

  // ---- What is chosen.

  // S, the mean over the rows, is compared with T as 2^(log2 S - log2 T) with 1. A ratio that
  // overflows is chosen, and one that underflows is far below.
  __device__ Chosen pass(float threshold) const {
    const uint32_t count = this->own_count(), first = thread_ * this->each();
    const int rows = p_.group;
    float least[kMostGroup];
#pragma unroll
    for (int r = 0; r < kMostGroup; ++r) least[r] = r < rows ? s_.lse[r] + threshold : 0;
    Chosen chosen = this->none();
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      const float* logits = logits_ + first + i;
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kMostGroup; ++r) {
        if (r >= rows) break;
        sum += ptx::ex2_approx(logits[r * stride_] - least[r]);
      }
      chosen.set(i, sum >= static_cast<float>(rows));
    }
    return chosen;
  }

  // Puts log2 S, the mean over the rows, in the place of the first row's logit.
  __device__ void combine() {
    const uint32_t count = this->own_count(), first = thread_ * this->each();
    const int rows = p_.group;
    const float log_group = __log2f(static_cast<float>(rows));
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
      if (top > -INFINITY) top += __log2f(sum) - log_group;
      logits[0] = top;
    }
  }

  Shared& s_;
  float* logits_ = nullptr;  // [group][stride_] of the slice; global memory if it has no room
  const int stride_;
  float maximum_ = 0, sum_ = 0;
};

}  // namespace sqz::cuda
