// For every rule, and for pages; one kernel for all levels. A team of blocks serves a pair: it
// splits what is alive at a level, tells its members sums, and goes on together.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode_lookup/kernel.h"
#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"
#include "libruntime/kernels/cuda/decode_lookup/rules.cuh"
#include "libruntime/kernels/cuda/ptx/prefetch.cuh"

namespace sqz::cuda {

template <class Element, int kDim, bool kPages>
class Lookup : private LookupRules {
 public:
  // `slice_memory`: `room` words of shared memory.
  __device__ Lookup(const LookupParams& params, int team, int room, LookupShared<kDim>& shared,
                    float* slice_memory)
      : LookupRules(params, team, static_cast<int>(blockIdx.x) / team, shared.rules), s_(shared) {
    // A slice of every level fits in shared memory, or none is there.
    const int64_t most = (p_.width + team - 1) / team;
    if (most * (p_.group + 2) <= room) {
      spans_ = reinterpret_cast<uint2*>(slice_memory);
      logits_ = slice_memory + 2 * most;
      row_stride_ = most;
    } else {
      logits_ = p_.logits + static_cast<int64_t>(pair_) * p_.group * p_.width;
      row_stride_ = p_.width;
    }
  }

  __device__ void run() {
    look_up();
    leave_team();
  }

 private:
  __device__ void look_up() {
    ask_ahead();
    ptx::griddepcontrol_wait();
    // Not before the queries are there: attention counts on it.
    ptx::griddepcontrol_launch_dependents();
    load_queries();
    uint32_t count = p_.level[0].clusters;
#pragma unroll 1
    for (int k = 0; k < p_.levels; ++k) {
      const LookupLevel& level = p_.level[k];
      const uint32_t* alive = k == 0 ? nullptr : alive_list(k - 1);
      take_slice(count);
      centroids_ += count * (kPages ? 2 : 1);
      bool sound = score(level, alive);
      if (kPages) {
        sound = all_sound(combine_pages());
      } else if (sound) {
        combine();
      }
      if (!sound) {
        if (rank_ == 0 && thread_ == 0) end_with_fault(p_, pair_);
        return;
      }
      const bool finest = k + 1 == p_.levels;
      choose(level, alive, finest);
      if (finest) {
        emit(level, alive);
      } else {
        count = list_children(level, alive, alive_list(k));
      }
    }
  }

  // What does not depend on earlier kernels starts its way from memory: the first level, and what
  // is small of all.
  __device__ void ask_ahead() const {
    const int64_t row = kDim * 2;
#pragma unroll 1
    for (int k = 0; k < p_.levels; ++k) {
      const LookupLevel& level = p_.level[k];
      if (k == 0) ask_for(level.centroids, level.clusters * row);
      if (k == 0 && kPages) ask_for(level.greatest, level.clusters * row);
      ask_for(level.offsets, (level.clusters + 1) * int64_t{4});
      if (kPages) continue;
      ask_for(level.log_sizes, level.clusters * int64_t{4});
      if (p_.rule != LookupRule::kThreshold) ask_for(level.sizes, level.clusters * int64_t{4});
    }
  }

  // The team's head of an array, into the L2.
  __device__ void ask_for(const void* array, int64_t bytes) const {
    const auto* from = static_cast<const char*>(array) + head_ * bytes;
#pragma unroll 1
    for (int64_t at = (rank_ * kLookupThreads + thread_) * int64_t{128}; at < bytes;
         at += team_ * kLookupThreads * int64_t{128}) {
      ptx::prefetch_l2(from + at);
    }
  }

  __device__ uint32_t* alive_list(int level) const {
    return p_.alive + (static_cast<int64_t>(pair_) * 2 + level % 2) * p_.width;
  }

  __device__ void take_slice(uint32_t count) {
    const uint32_t each = count / team_, more = count % team_, rank = rank_;
    begin_ = rank * each + min(rank, more);
    end_ = begin_ + each + (rank < more ? 1 : 0);
    // A cluster's score takes the place of its first logit; both are found by the cluster's place
    // among those that are alive.
    scores_ = logits_ - (logits_in_shared() ? begin_ : 0);
  }
  __device__ bool logits_in_shared() const {
    return row_stride_ != p_.width || team_ == 1;
  }
  __device__ float& logit(int row, uint32_t j) const {
    return scores_[row * row_stride_ + j];
  }

  // ---- Scores.

  __device__ void load_queries() {
    const int64_t first =
        (static_cast<int64_t>(pair_ / p_.kv_heads) * p_.kv_heads + head_) * p_.group;
    const auto dims = [&](int row, int chunk, float(&x)[8]) {
      load_8(p_.q_dtype, p_.q, (first + row) * kDim + chunk * 8, x);
    };
    if (!kPages) {
      make_query_rows<Element, kDim>(s_.queries, p_.group, thread_, kLookupThreads,
                                     [&](int row, int chunk, float(&x)[8]) {
                                       dims(row, chunk, x);
#pragma unroll
                                       for (int i = 0; i < 8; ++i) x[i] *= p_.scale;
                                     });
      __syncthreads();
      return;
    }
    // The bound of a page is linear in the positive and negative parts of a query, so that the mean
    // over queries is the bound of their mean parts.
    const auto part = [&](bool positive) {
      return [&, positive](int row, int chunk, float(&x)[8]) {
        const int rows = p_.mean ? p_.group : 1;
        for (int r = 0; r < rows; ++r) {
          float y[8];
          dims(p_.mean ? r : row, chunk, y);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float z = positive ? fmaxf(y[i], 0.0f) : fminf(y[i], 0.0f);
            // fmaxf and fminf drop NaN; a bound must not.
            x[i] += (y[i] == y[i] ? z : y[i]) / static_cast<float>(rows);
          }
        }
      };
    };
    const int rows = page_rows();
    make_query_rows<Element, kDim>(s_.queries, rows, thread_, kLookupThreads, part(true));
    make_query_rows<Element, kDim>(s_.lower, rows, thread_, kLookupThreads, part(false));
    __syncthreads();
  }

  __device__ int page_rows() const {
    return p_.mean ? 1 : p_.group;
  }

  static constexpr int kTiles = kPages || kDim > 128 ? 1 : 2;  // of 8 rows, that a warp has at once

  // A step of a warp: rows of memory, and what the columns of their products stand for.
  struct Step {
    RowPart<kDim> rows[kTiles];
    float log_sizes[kTiles][2];
  };

  __device__ __forceinline__ void load_step(const LookupLevel& level, const uint32_t* alive,
                                            uint32_t tile, const void* from, Step& step) const {
    const auto* base =
        static_cast<const char*>(from) + static_cast<int64_t>(head_) * level.clusters * kDim * 2;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint32_t row = cluster_of(alive, min(tile + 8 * t + lane_ / 4, end_ - 1));
      step.rows[t].load(base + static_cast<int64_t>(row) * kDim * 2, lane_);
      if (kPages) continue;
      const float* sizes = level.log_sizes + static_cast<int64_t>(head_) * level.clusters;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t j = min(tile + 8 * t + 2 * (lane_ % 4) + i, end_ - 1);
        step.log_sizes[t][i] = __ldg(sizes + cluster_of(alive, j));
      }
    }
  }

  // Logits of the slice to memory, -infinity for empty clusters, and the log-sum-exp of clusters;
  // false if one is NaN or infinite.
  __device__ bool score(const LookupLevel& level, const uint32_t* alive) {
    constexpr uint32_t kStep = 8 * kTiles;
    const int row = lane_ / 4;
    const int rows = kPages ? page_rows() : p_.group;
    float maximum = kLowestLogit, sum = 0;
    const auto finish = [&](uint32_t tile, const Step& step, const float(&d)[kTiles][4]) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t j = tile + 8 * t + 2 * (lane_ % 4) + i;
          const float x = d[t][i] + d[t][i + 2];
          if (j >= end_ || row >= rows) continue;
          if (kPages) {
            logit(row, j) = x;
            continue;
          }
          const float log_size = step.log_sizes[t][i];
          logit(row, j) = log_size == -INFINITY ? -INFINITY : x;
          if (log_size == -INFINITY) continue;
          const float y = x + log_size * 1.4426950408889634f;
          if (!(y <= maximum)) {
            sum *= exp2f(maximum - y);
            maximum = y;
          }
          sum += exp2f(y - maximum);
        }
      }
    };
    // Two steps under way.
    constexpr uint32_t kStride = kLookupWarps * kStep;
    const void* first = kPages ? level.greatest : level.centroids;
    Step now, next;
    uint32_t tile = begin_ + warp_ * kStep;
    if (tile < end_) load_step(level, alive, tile, first, now);
    fetch_spans(level, alive);
#pragma unroll 1
    for (; tile < end_; tile += kStride) {
      load_step(level, alive, min(tile + kStride, end_ - 1), first, next);
      float d[kTiles][4] = {};
      multiply_rows<Element, kDim, kTiles>(s_.queries, now.rows, lane_, d);
      if (kPages) {
        load_step(level, alive, tile, level.centroids, now);
        multiply_rows<Element, kDim, kTiles>(s_.lower, now.rows, lane_, d);
      }
      finish(tile, now, d);
      now = next;
    }
    ptx::cp_async_wait_group<0>();  // whoever waits for the block's scores waits for spans_, too
    return kPages || add_up(maximum, sum);
  }

  // s_.lse[row] over the team; false if one is NaN or infinite.
  __device__ bool add_up(float maximum, float sum) {
    add_sums_of_lanes(maximum, sum);
    __syncthreads();
    if (lane_ % 4 == 0) {
      s_.maximum[warp_][lane_ / 4] = maximum;
      s_.sum[warp_][lane_ / 4] = sum;
    }
    if (thread_ == 0) s_.fault = 0;
    __syncthreads();
    if (thread_ < kMostGroup) {
      float m = kLowestLogit, l = 0;
#pragma unroll
      for (int w = 0; w < kLookupWarps; ++w)
        add_sums(m, l, s_.maximum[w][thread_], s_.sum[w][thread_]);
      own_words()[2 * thread_] = __float_as_uint(m);
      own_words()[2 * thread_ + 1] = __float_as_uint(l);
    }
    sync_team();
    if (thread_ < kMostGroup * kMostTeam) {
      // Thread 16 row + rank; a butterfly, so that all blocks add in the same order.
      const int row = thread_ / kMostTeam, rank = thread_ % kMostTeam;
      float2 sums = make_float2(kLowestLogit, 0);
      if (rank < team_) {
        sums.x = __uint_as_float(told(rank, 2 * row));
        sums.y = __uint_as_float(told(rank, 2 * row + 1));
      }
#pragma unroll
      for (int step = 1; step < kMostTeam; step *= 2) {
        const float m = __shfl_xor_sync(~0u, sums.x, step);
        const float l = __shfl_xor_sync(~0u, sums.y, step);
        add_sums(sums.x, sums.y, m, l);
      }
      if (rank == 0) {
        // Nothing alive: no logit will be compared with it.
        const float lse = sums.y == 0 ? 0 : sums.x + log2f(sums.y);
        s_.lse[row] = lse;
        if (row < p_.group && !(fabsf(lse) <= FLT_MAX)) s_.fault = 1;
      }
    }
    next_turn();
    __syncthreads();
    return s_.fault == 0;
  }

  // scores_[j] = log2 of the combined S of the slice's clusters; -infinity for empty ones.
  __device__ void combine() {
    const float log_group = log2f(static_cast<float>(p_.group));
#pragma unroll 1
    for (uint32_t j = begin_ + thread_; j < end_; j += kLookupThreads) {
      float y[kMostGroup];
      float top = -INFINITY;
#pragma unroll
      for (int r = 0; r < kMostGroup; ++r) {
        y[r] = r < p_.group ? logit(r, j) - s_.lse[r] : -INFINITY;
        top = fmaxf(top, y[r]);
      }
      float score = top;
      if (p_.mean && top > -INFINITY) {
        float sum = 0;
#pragma unroll
        for (int r = 0; r < kMostGroup; ++r) sum += exp2f(y[r] - top);
        score = top + log2f(sum) - log_group;
      }
      scores_[j] = score;
    }
    __syncthreads();
  }

  // The greatest bound over the rows; true if all are finite.
  __device__ bool combine_pages() {
    __syncthreads();
    bool sound = true;
#pragma unroll 1
    for (uint32_t j = begin_ + thread_; j < end_; j += kLookupThreads) {
      float top = -INFINITY;
      for (int r = 0; r < page_rows(); ++r) {
        const float x = logit(r, j);
        sound = sound && fabsf(x) <= FLT_MAX;
        top = fmaxf(top, x);
      }
      scores_[j] = top;
    }
    return sound;
  }

  __device__ bool all_sound(bool sound) {
    Sums all;
    team_sums(block_sums({sound ? 0u : 1u, 0}), all);
    return all.a == 0;
  }

  LookupShared<kDim>& s_;
  float* logits_;       // of the slice in shared memory, or of the pair in global memory
  int64_t row_stride_;  // of logits_
};

}  // namespace sqz::cuda
