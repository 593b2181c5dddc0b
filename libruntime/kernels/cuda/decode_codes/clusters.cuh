// Clusters, level by level: every block scores a slice of a level and leaves the logits to its
// team, and then chooses by itself among all of the level, as the others do.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/decode_codes/border.cuh"

namespace sqz::cuda {

template <class Element, int kDim>
class CodedClusters : protected CodedSearch<kDim> {
 public:
  // `room`: words of `memory`, shared.
  __device__ CodedClusters(const CodedParams& params, int team, CodedShared<kDim>& shared,
                           uint32_t* memory, int64_t room)
      : CodedSearch<kDim>(params, team, shared),
        total_(static_cast<uint32_t>(params.total_clusters())),
        stride_(coded_stride(params.lookup.group)),
        logits_(params.workspace.logits + int64_t{pair_} * total_ * stride_) {
    const int64_t words = coded_cluster_words(p_.width, total_);
    uint32_t* at = memory;
    if (words <= room) {
      memory_ = memory + words;
      room_ = room - words;
    } else {
      at = params.workspace.clusters + blockIdx.x * words;
      memory_ = memory;
      room_ = room;
    }
    scores_ = reinterpret_cast<float*>(at);
    fates_ = reinterpret_cast<uint8_t*>(at + p_.width);
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

  // False: a logit is NaN or infinite. Queries are in s_.queries.
  __device__ bool choose_clusters() {
    for (uint32_t i = thread_; i < total_; i += kCodedThreads) {
      fates_[i] = i < static_cast<uint32_t>(p_.level[0].clusters) ? kFateEstimated : kFateNone;
    }
    __syncthreads();
    first_ = 0;
#pragma unroll 1
    for (int k = 0;; ++k) {
      const bool finest = k + 1 == p_.levels;
      if (!score_level(p_.level[k])) return false;
      if (c_.everything) {
        for (uint32_t i = thread_; i < total_; i += kCodedThreads) fates_[i] = kFateChosen;
        __syncthreads();
        return true;
      }
      combine(p_.level[k]);
      choose(p_.level[k], finest);
      if (finest) return true;
      give_birth(p_.level[k]);
      first_ += p_.level[k].clusters;
    }
  }

  // ---- For any rows of 16 bits.

  // done(j, r, product) for rows row_at(j) of memory, j in [0, count), each by one lane.
  template <class RowAt, class Done>
  __device__ __forceinline__ void multiply_16(uint32_t count, const RowAt& row_at,
                                              const Done& done) const {
    constexpr int kTiles = kDim > 128 ? 1 : 2;
#pragma unroll 1
    for (uint32_t tile = warp_ * 8 * kTiles; tile < count; tile += kCodedWarps * 8 * kTiles) {
      RowPart<kDim> rows[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        rows[t].load(row_at(min(tile + 8 * t + lane_ / 4, count - 1)), lane_);
      }
      float d[kTiles][4] = {};
      multiply_rows<Element, kDim, kTiles>(s_.queries, rows, lane_, d);
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const uint32_t j = tile + 8 * (i / 2) + 2 * (lane_ % 4) + i % 2;
        if (j < count && lane_ / 4 < p_.group) {
          done(j, lane_ / 4, d[i / 2][i % 2] + d[i / 2][i % 2 + 2]);
        }
      }
    }
  }

  __device__ static const char* row_16(const void* rows, int64_t row) {
    return static_cast<const char*>(rows) + row * kRowBytes;
  }
  // A logit of cluster j of the finest level, or of level `first` + j, without its size.
  __device__ float logit_of(uint32_t first, uint32_t cluster, int row) const {
    return __ldcg(logits_ + (int64_t{first} + cluster) * stride_ + row);
  }
  __device__ static float log2_size(const LookupLevel& level, int head, uint32_t cluster) {
    return __ldg(level.log_sizes + int64_t{head} * level.clusters + cluster) * 1.4426950408889634f;
  }
  __device__ static uint32_t size_of(const LookupLevel& level, int head, uint32_t cluster) {
    return __ldg(level.sizes + int64_t{head} * level.clusters + cluster);
  }
  // This block's part of `count`.
  __device__ uint2 slice_of(uint32_t count) const {
    const uint32_t each = count / team_, more = count % team_, rank = rank_;
    const uint32_t begin = rank * each + min(rank, more);
    return make_uint2(begin, begin + each + (rank < more ? 1 : 0));
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
    if (thread_ < kMostGroup) {
      float m = kLowestLogit, l = 0;
      for (int w = 0; w < kCodedWarps; ++w)
        add_sums(m, l, s_.maximum[w][thread_], s_.sum[w][thread_]);
      this->own_words()[2 * thread_] = __float_as_uint(m);
      this->own_words()[2 * thread_ + 1] = __float_as_uint(l);
    }
    this->sync_team();
    if (thread_ < kMostGroup * kMostTeam) {
      // Thread 16 row + rank; a butterfly, so that all blocks add in the same order.
      const int row = thread_ / kMostTeam, rank = thread_ % kMostTeam;
      float m = kLowestLogit, l = 0;
      if (rank < team_) {
        m = __uint_as_float(this->told(rank, 2 * row));
        l = __uint_as_float(this->told(rank, 2 * row + 1));
      }
      add_sums_of_team(m, l);
      if (rank == 0) {
        const float lse = l == 0 ? 0 : m + log2f(l);
        s_.lse[row] = lse;
        if (row < p_.group && !(fabsf(lse) <= FLT_MAX)) s_.fault = 1;
      }
    }
    this->next_turn();
    __syncthreads();
    return s_.fault == 0;
  }

  // Of 16 neighbouring lanes, one a rank.
  __device__ static void add_sums_of_team(float& maximum, float& sum) {
#pragma unroll
    for (int step = 1; step < kMostTeam; step *= 2) {
      const float m = __shfl_xor_sync(~0u, maximum, step), l = __shfl_xor_sync(~0u, sum, step);
      add_sums(maximum, sum, m, l);
    }
  }

  // log2 of the combined S of logits y(r).
  template <class Logit>
  __device__ float combined(const Logit& logit) const {
    float y[kMostGroup];
    float top = -INFINITY;
#pragma unroll
    for (int r = 0; r < kMostGroup; ++r) {
      y[r] = r < p_.group ? logit(r) - s_.lse[r] : -INFINITY;
      top = fmaxf(top, y[r]);
    }
    if (!p_.mean || top == -INFINITY) return top;
    float sum = 0;
#pragma unroll
    for (int r = 0; r < kMostGroup; ++r) sum += exp2f(y[r] - top);
    return top + log2f(sum) - log2f(static_cast<float>(p_.group));
  }

  const uint32_t total_;  // clusters of all levels
  const int stride_;
  float* const logits_;       // [total, stride] of the pair
  float* scores_ = nullptr;   // [width] of the level at hand
  uint8_t* fates_ = nullptr;  // [total] CodedFate
  uint32_t first_ = 0;        // of the level at hand, among those of all
  uint32_t wanted_ = 0;       // keys that the finest level's choice has
  uint32_t scored_ = 0;       // clusters
  uint32_t* memory_;          // what is left of shared memory
  int64_t room_;

 private:
  __device__ bool score_level(const LookupLevel& level) {
    const uint2 slice = slice_of(level.clusters);
    float maximum = kLowestLogit, sum = 0;
    const int64_t skip = int64_t{head_} * level.clusters;
    multiply_16(
        slice.y - slice.x, [&](uint32_t j) { return row_16(level.centroids, skip + slice.x + j); },
        [&](uint32_t j, int row, float x) {
          const uint32_t cluster = slice.x + j;
          logits_[(int64_t{first_} + cluster) * stride_ + row] = x;
          if (fates_[first_ + cluster] == kFateNone) return;
          const float log_size = log2_size(level, head_, cluster);
          if (log_size == -INFINITY) return;
          const float y = x + log_size;
          if (!(y <= maximum)) {
            sum *= exp2f(maximum - y);
            maximum = y;
          }
          sum += exp2f(y - maximum);
        });
    return add_up(maximum, sum);
  }

  __device__ void combine(const LookupLevel& level) {
    uint32_t alive = 0;
#pragma unroll 1
    for (uint32_t j = thread_; j < static_cast<uint32_t>(level.clusters); j += kCodedThreads) {
      const bool is = fates_[first_ + j] != kFateNone;
      alive += is ? 1 : 0;
      scores_[j] = is && size_of(level, head_, j) > 0
                       ? combined([&](int r) { return logit_of(first_, j, r); })
                       : -INFINITY;
    }
    scored_ += this->block_sums({alive, 0}).a;
  }

  // The rule's choice, and with key codes as many more as let their keys through.
  __device__ void choose(const LookupLevel& level, bool finest) {
    uint32_t kept = 0;
    if (p_.rule == LookupRule::kThreshold || !finest) kept = pass(level);
    if (p_.rule == LookupRule::kBudget && (finest || kept < p_.wanted[head_])) {
      kept = best(level, p_.wanted[head_], finest);
    }
    wanted_ = kept;
    if (c_.key_codes.bits == 0) return;
    if (finest || kept < c_.alive) best(level, max(kept, c_.alive), false);
  }

  // What reaches the threshold; its keys.
  __device__ uint32_t pass(const LookupLevel& level) {
    return mark(
        level, [&](uint32_t j) { return scores_[j] >= level.threshold && scores_[j] > -INFINITY; });
  }
  __device__ uint32_t best(const LookupLevel& level, uint32_t wanted, bool nearest) {
    const auto size = [&](uint32_t j) { return size_of(level, head_, j); };
    const CodedBorder border = this->template find_border<false>(
        level.clusters, wanted, [&](uint32_t j) { return scores_[j]; }, size,
        [](uint32_t j) { return j; });
    return mark(level, [&](uint32_t j) { return border.chooses(scores_[j], j, size(j), nearest); });
  }
  template <class Chosen>
  __device__ uint32_t mark(const LookupLevel& level, const Chosen& chosen) {
    uint32_t keys = 0;
#pragma unroll 1
    for (uint32_t j = thread_; j < static_cast<uint32_t>(level.clusters); j += kCodedThreads) {
      if (fates_[first_ + j] == kFateNone) continue;
      const bool is = chosen(j);
      fates_[first_ + j] = is ? kFateChosen : kFateEstimated;
      keys += is ? size_of(level, head_, j) : 0;
    }
    return this->block_sums({keys, 0}).a;
  }

  // The children of what was chosen are alive at the next level.
  __device__ void give_birth(const LookupLevel& level) {
    const uint32_t* offsets = level.offsets + int64_t{head_} * (level.clusters + 1);
    uint8_t* children = fates_ + first_ + level.clusters;
#pragma unroll 1
    for (uint32_t j = thread_; j < static_cast<uint32_t>(level.clusters); j += kCodedThreads) {
      if (fates_[first_ + j] != kFateChosen) continue;
      for (uint32_t child = offsets[j]; child < offsets[j + 1]; ++child) {
        children[child] = kFateEstimated;
      }
    }
    __syncthreads();
  }
};

}  // namespace sqz::cuda
