// Clusters, level by level. A block has every team-th of each: it scores these, decides what
// becomes of them once the team has found the cutoff, and has what comes of them to the end.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/decode_codes/cutoff.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda {

template <class Element, int kDim, int kRows>
class CodedClusters : protected CodedSearch<kDim> {
 public:
  // `room`: words of `memory`, shared.
  __device__ CodedClusters(const CodedParams& params, int team, CodedShared<kDim>& shared,
                           uint32_t* memory, int64_t room)
      : CodedSearch<kDim>(params, team, shared) {
    const int64_t total = params.total_clusters();
    const int64_t own = coded_own_clusters(total, p_.levels, team);
    const int64_t words = coded_block_words(own, p_.group);
    uint32_t* at = memory;
    if (words <= room) {
      memory_ = memory + words;
      room_ = room - words;
    } else {
      at = c_.workspace.clusters + pair_ * coded_cluster_words(total, p_.levels, p_.group) +
           rank_ * words;
      memory_ = memory;
      room_ = room;
    }
    logits_ = reinterpret_cast<float*>(at);
    scores_ = logits_ + own * kRows;
    sizes_ = reinterpret_cast<uint32_t*>(scores_ + own);
    fates_ = reinterpret_cast<uint8_t*>(sizes_ + own);
  }

 protected:
  using Base = CodedSearch<kDim>;
  using Base::c_;
  using Base::head_;
  using Base::lane_;
  using Base::p_;
  using Base::pair_;
  using Base::rank_;
  using Base::s_;
  using Base::team_;
  using Base::thread_;
  using Base::warp_;
  static constexpr int64_t kRowBytes = kDim * 2;

  // False: a logit is NaN or infinite. Queries are in s_.queries, and the first level is taken.
  __device__ bool choose_clusters() {
#pragma unroll 1
    for (int k = 0;; ++k) {
      if (!score_level(p_.level[k])) return false;
      if (c_.everything) {
        let_all_through();
        return true;
      }
      choose(p_.level[k], k + 1 == p_.levels);
      if (k + 1 == p_.levels) return true;
      give_birth(p_.level[k], p_.level[k + 1]);
      first_ += own_;
      take_level(p_.level[k + 1], true);
    }
  }

  // Sizes and fates of this block's clusters of a level.
  __device__ void take_level(const LookupLevel& level, bool has_parents) {
    own_ = own_of(level.clusters);
    const uint32_t* sizes = level.sizes + int64_t{head_} * level.clusters;
#pragma unroll 1
    for (uint32_t i = thread_; i < own_; i += kCodedThreads) {
      const bool is = !has_parents || __ldcg(born() + cluster_at(i)) != 0;
      const uint32_t size = __ldg(sizes + cluster_at(i));
      sizes_[first_ + i] = size;
      scores_[first_ + i] = is ? log2f(static_cast<float>(size)) : -INFINITY;
      fates_[first_ + i] = is ? kFateEstimated : kFateNone;
    }
    __syncthreads();
  }

  // ---- For any rows of 16 bits.

  // done(first, products) for rows row_at(j) of memory, j in [0, count), by lanes whose query row
  // lane / 4 there is: products[i] is of row first + row_of_product(i), if that is below count.
  template <class RowAt, class Done>
  __device__ __forceinline__ void multiply_16(uint32_t count, const RowAt& row_at,
                                              const Done& done) const {
    constexpr int kTiles = kProducts / 2;
#pragma unroll 1
    for (uint32_t tile = warp_ * 8 * kTiles; tile < count; tile += kCodedWarps * 8 * kTiles) {
      RowPart<kDim> rows[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        rows[t].load(row_at(min(tile + 8 * t + lane_ / 4, count - 1)), lane_);
      }
      float d[kTiles][4] = {};
      multiply_rows<Element, kDim, kTiles>(s_.queries, rows, lane_, d);
      float products[kProducts];
#pragma unroll
      for (int i = 0; i < kProducts; ++i) products[i] = d[i / 2][i % 2] + d[i / 2][i % 2 + 2];
      if (lane_ / 4 < p_.group) done(tile + 2 * (lane_ % 4), products);
    }
  }
  static constexpr int kProducts = kDim > 128 ? 4 : 8;
  __device__ static constexpr uint32_t row_of_product(int i) {
    return 8 * (i / 2) + i % 2;
  }

  __device__ static const char* row_16(const void* rows, int64_t row) {
    return static_cast<const char*>(rows) + row * kRowBytes;
  }
  // Of this block's clusters and keys that are no cluster's.
  __device__ uint32_t own_of(uint32_t count) const {
    return (count + team_ - 1 - rank_) / team_;
  }
  __device__ uint32_t cluster_at(uint32_t own) const {
    return own * team_ + rank_;
  }

  // sum 2^maximum += 2^y of all y; a NaN stays.
  template <int kCount>
  __device__ static void add_exponentials(const float (&y)[kCount], float& maximum, float& sum) {
    float top = maximum;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!(y[i] <= top)) top = y[i];
    }
    sum *= ptx::ex2_approx(maximum - top);
    maximum = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += ptx::ex2_approx(y[i] - maximum);
  }

  // s_.lse[r] over the team, from each lane's sum of 2^logits of query row lane / 4; false if one
  // is NaN or infinite.
  __device__ bool add_up(float maximum, float sum) {
    add_sums_of_lanes(maximum, sum);
    if (lane_ % 4 == 0) {
      s_.maximum[warp_][lane_ / 4] = maximum;
      s_.sum[warp_][lane_ / 4] = sum;
    }
    if (thread_ == 0) s_.fault = 0;
    __syncthreads();
    // Thread 16 row + warp.
    if (thread_ < kMostGroup * kCodedWarps) {
      const int row = thread_ / kCodedWarps, warp = thread_ % kCodedWarps;
      float m = s_.maximum[warp][row], l = s_.sum[warp][row];
      add_sums_of_16(m, l);
      if (warp == 0) {
        this->own_words()[2 * row] = __float_as_uint(m);
        this->own_words()[2 * row + 1] = __float_as_uint(l);
      }
    }
    this->sync_team();
    if (thread_ < kMostGroup * kMostTeam) {
      // Thread 16 row + rank; a butterfly, so that all blocks add in the same order.
      const int row = thread_ / kMostTeam, rank = thread_ % kMostTeam;
      float m = kLowestLogit, l = 0;
      if (rank < team_) {
        m = __uint_as_float(this->received(rank, 2 * row));
        l = __uint_as_float(this->received(rank, 2 * row + 1));
      }
      add_sums_of_16(m, l);
      if (rank == 0) {
        const float lse = l == 0 ? 0 : m + __log2f(l);
        s_.lse[row] = lse;
        if (row < p_.group && !(fabsf(lse) <= FLT_MAX)) s_.fault = 1;
      }
    }
    this->next_turn();
    __syncthreads();
    return s_.fault == 0;
  }

  // Of 16 neighbouring lanes: a team's or a block's. All get the same.
  __device__ static void add_sums_of_16(float& maximum, float& sum) {
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      const float m = __shfl_xor_sync(~0u, maximum, step), l = __shfl_xor_sync(~0u, sum, step);
      const float top = fmaxf(maximum, m);
      sum = sum * ptx::ex2_approx(maximum - top) + l * ptx::ex2_approx(m - top);
      maximum = top;
    }
  }

  // log2 of the combined S of logits y(r).
  template <class Logit>
  __device__ float combined(const Logit& logit) const {
    float y[kRows];
    float top = -INFINITY;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      y[r] = r < p_.group ? logit(r) - s_.lse[r] : -INFINITY;
      top = fmaxf(top, y[r]);
    }
    if (!p_.mean || top == -INFINITY) return top;
    float sum = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum += r < p_.group ? ptx::ex2_approx(y[r] - top) : 0;
    return top + __log2f(sum) - __log2f(static_cast<float>(p_.group));
  }

  // Of all threads; vectors and codes that were read.
  __device__ void count(uint32_t vectors, uint32_t codes) {
    vectors = __reduce_add_sync(~0u, vectors);
    codes = __reduce_add_sync(~0u, codes);
    if (lane_ != 0) return;
    if (vectors > 0) atomicAdd(&s_.vectors, vectors);
    if (codes > 0) atomicAdd(&s_.codes, codes);
  }

  // Of this block's clusters, level after level.
  float* logits_;    // [own, kRows] without sizes, log2; those of what is estimated: weights later
  float* scores_;    // [own]
  uint32_t* sizes_;  // [own]
  uint8_t* fates_;   // [own] CodedFate
  uint32_t first_ = 0;   // of the level at hand
  uint32_t own_ = 0;     // of the level at hand
  uint32_t wanted_ = 0;  // keys that the finest level's choice has
  uint32_t* memory_;     // what is left of shared memory
  int64_t room_;

 private:
  __device__ uint8_t* born() const {
    return c_.workspace.born + pair_ * p_.width;
  }

  __device__ bool score_level(const LookupLevel& level) {
    float maximum = kLowestLogit, sum = 0;
    const int64_t skip = int64_t{head_} * level.clusters;
    multiply_16(
        own_, [&](uint32_t j) { return row_16(level.centroids, skip + cluster_at(j)); },
        [&](uint32_t first, float(&x)[kProducts]) {
          float* to = logits_ + (first_ + first) * kRows + lane_ / 4;
#pragma unroll
          for (int i = 0; i < kProducts; ++i) {
            const uint32_t j = row_of_product(i);
            const bool is = first + j < own_;
            if (is) to[j * kRows] = x[i];
            const float log_size = is ? scores_[first_ + first + j] : -INFINITY;
            x[i] = log_size > -INFINITY ? x[i] + log_size : -INFINITY;
          }
          add_exponentials(x, maximum, sum);
        });
    return add_up(maximum, sum);
  }

  __device__ void let_all_through() {
    uint32_t clusters = 0;
#pragma unroll 1
    for (uint32_t i = thread_; i < own_; i += kCodedThreads) {
      fates_[i] = sizes_[i] > 0 ? kFateChosen : kFateNone;
      ++clusters;
    }
    count(c_.coded_keys.bits > 0 ? 2 * clusters : 0, 0);
    __syncthreads();
  }

  // The rule's choice, and with key codes as many more as let their keys through.
  __device__ void choose(const LookupLevel& level, bool finest) {
    const bool by_codes = c_.key_codes.bits > 0;
    uint32_t passed = 0;
#pragma unroll 1
    for (uint32_t i = first_ + thread_; i < first_ + own_; i += kCodedThreads) {
      const float score = scores_[i] > -INFINITY
                              ? combined([&](int r) { return logits_[i * kRows + r]; })
                              : -INFINITY;
      scores_[i] = score;
      if (score >= level.threshold && score > -INFINITY) passed += sizes_[i];
    }
    const bool passes = p_.rule == LookupRule::kThreshold || !finest;
    bool best = false, more = false;
    CodedCutoff cutoffs[2] = {{false, 0, false}, {false, 0, false}};
    if (p_.rule == LookupRule::kBudget || by_codes) {
      const auto bins = this->add_bins(
          own_, [&](uint32_t i) { return CodedCutoff::first_bin(scores_[first_ + i]); },
          [&](uint32_t i) { return sizes_[first_ + i]; }, passes ? passed : 0);
      const uint32_t wanted = p_.rule == LookupRule::kBudget ? p_.wanted[head_] : 0;
      best = p_.rule == LookupRule::kBudget && (finest || bins.extra < wanted);
      cutoffs[0] = {best, wanted, finest};
      cutoffs[1] = {by_codes, c_.alive, false};
      this->find(
          cutoffs, bins, own_, [&](uint32_t i) { return scores_[first_ + i]; },
          [&](uint32_t i) { return sizes_[first_ + i]; },
          [&](uint32_t i) { return cluster_at(i); });
      wanted_ = best ? cutoffs[0].keys() : bins.extra;
      more = by_codes && wanted_ < c_.alive;
    }
    const bool through = finest && (c_.coded_keys.bits > 0 || (by_codes && c_.estimate));
    uint32_t vectors = 0, codes = 0;
#pragma unroll 1
    for (uint32_t i = thread_; i < own_; i += kCodedThreads) {
      uint8_t& fate = fates_[first_ + i];
      if (fate == kFateNone) continue;
      const float score = scores_[first_ + i];
      const bool is = more   ? cutoffs[1].chooses(score, cluster_at(i))
                      : best ? cutoffs[0].chooses(score, cluster_at(i))
                             : score >= level.threshold && score > -INFINITY;
      fate = is ? kFateChosen : kFateEstimated;
      vectors += 1 + (is ? through : c_.estimate);
      codes += finest && is ? sizes_[first_ + i] : 0;
    }
    count(vectors, codes);
    __syncthreads();
  }

  // The children of what was chosen are alive at the next level.
  __device__ void give_birth(const LookupLevel& level, const LookupLevel& next) {
    const uint32_t* offsets = level.offsets + int64_t{head_} * (level.clusters + 1);
#pragma unroll 1
    for (uint32_t i = thread_; i < own_; i += kCodedThreads) {
      const uint32_t j = cluster_at(i);
      const uint8_t is = fates_[first_ + i] == kFateChosen ? 1 : 0;
      for (uint32_t child = offsets[j]; child < offsets[j + 1]; ++child) born()[child] = is;
    }
    this->sync_team();
  }
};

}  // namespace sqz::cuda
