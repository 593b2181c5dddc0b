// Two kernels a level: sums of exponentials, and the choice. Both make the product of centroids and
// queries: reading centroids again, from the L2, takes less than writing logits, which are as large
// for 64 query heads and larger for more.
#pragma once

#include <type_traits>

#include "libruntime/kernels/cuda/batch/lookup/product.cuh"
#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda {

template <int kDim>
struct BatchSumsShared : BatchShared<kDim> {
  float2 sums[kBatchWarps][kBatchGroup];
};

// call.sums of a part.
template <class Element, int kDim, bool kAll>
class BatchSums : private BatchProduct<Element, kDim> {
  using Base = BatchProduct<Element, kDim>;
  using Base::call_, Base::p_, Base::k_, Base::part_, Base::list_, Base::group_, Base::groups_,
      Base::thread_, Base::lane_, Base::warp_;
  using typename Base::Tile, typename Base::Logits;

 public:
  __device__ BatchSums(const BatchLookup& call, int level, BatchSumsShared<kDim>& shared)
      : Base(call, level, shared), s_(shared) {}

  __device__ void run() {
    if (!this->looks_up()) return;
    Tile tile;
    if (kAll) this->load_first(tile);  // no earlier kernel writes it
    begin_dependent();
    // For the next kernel nothing is counted yet, and no block has begun.
    if (part_ == 0 && thread_ <= kBatchParts) this->counts()[thread_] = 0;
    if (!kAll) this->load_first(tile);
    this->load_queries();
    add_up(tile);
    this->tally(lane_ < 4 && group_ == 0 ? centroids_ : 0);
    __syncthreads();
    this->post(2);
    const int group = thread_ / kBatchGroup;
    if (group >= groups_) return;
    float m = kLowestLogit, l = 0;
    for (int w = group; w < kBatchWarps; w += groups_) {
      const float2 own = s_.sums[w][thread_ % kBatchGroup];
      add_sums(m, l, own.x, own.y);
    }
    call_.sums[(int64_t{list_} * kBatchParts + part_) * kBatchRows + thread_] = make_float2(m, l);
  }

 private:
  // s_.sums of the warp.
  __device__ void add_up(Tile& tile) {
    float maximum[kBatchOwn], sum[kBatchOwn];
#pragma unroll
    for (int v = 0; v < kBatchOwn; ++v) {
      maximum[v] = kLowestLogit;
      sum[v] = 0;
    }
    const auto body = [&](int first, const Logits& d) {
      float log_sizes[4];
      uint32_t words[4];
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        log_sizes[at] = this->log_size(tile, first, at / 2, at % 2);
        words[at] = this->word(tile, first, at / 2, at % 2);
        centroids_ += __popc(words[at]);
      }
#pragma unroll
      for (int v = 0; v < kBatchOwn; ++v) {
        if (v >= kBatchOwn / 2 && this->few_) break;
        float y[4], top = maximum[v];
#pragma unroll
        for (int at = 0; at < 4; ++at) {
          const int i = at / 2, e = at % 2;
          y[at] = fmaf(d[v / 2][i][v % 2 * 2 + e], p_.scale, log_sizes[at]);
          const int request = this->request_of(group_, v, lane_ / 4);
          if (!kAll && (words[at] >> min(request, 31) & 1) == 0) y[at] = -INFINITY;
          top = fmaxf(top, y[at]);
        }
        sum[v] *= ptx::ex2_approx(maximum[v] - top);
        maximum[v] = top;
#pragma unroll
        for (int at = 0; at < 4; ++at) sum[v] += ptx::ex2_approx(y[at] - top);
      }
    };
    this->template for_tiles<kAll>(tile, body, [](int) {});
    // Lanes 4 n + t, one of four each.
#pragma unroll
    for (int v = 0; v < kBatchOwn; ++v) {
      add_sums_of_lanes(maximum[v], sum[v]);
      if (v / 2 == lane_ % 4) {
        s_.sums[warp_][v * 8 + lane_ / 4] = make_float2(maximum[v], sum[v]);
      }
    }
  }

  BatchSumsShared<kDim>& s_;
  uint32_t centroids_ = 0;
};

template <int kDim>
struct BatchChoiceShared : BatchShared<kDim> {
  float lse[kBatchRows];  // with log2 T for the rule kThreshold; infinite: no such head
  uint32_t faults;        // bits of requests
};

// kScores: clusters get a score, for the rule kBudget. Else they are compared with a threshold.
template <class Element, int kDim, bool kScores>
class BatchChoice : private BatchProduct<Element, kDim> {
  using Base = BatchProduct<Element, kDim>;
  using Base::call_, Base::p_, Base::level_, Base::k_, Base::part_, Base::parts_, Base::list_,
      Base::requests_, Base::end_, Base::group_, Base::groups_, Base::halves_, Base::log_heads_,
      Base::thread_, Base::lane_;
  using typename Base::Tile, typename Base::Logits;
  using Rows = float[kBatchOwn];  // of a cluster

 public:
  __device__ BatchChoice(const BatchLookup& call, int level, BatchChoiceShared<kDim>& shared)
      : Base(call, level, shared), s_(shared) {}

  __device__ void run() {
    if (!kScores && this->is_whole()) return this->list_all();
    if (!this->looks_up()) return;
    Tile tile;
    if (k_ == 0) this->load_first(tile);
    begin_dependent();
    const bool moved = !kScores && this->take_ticket();
    if (k_ > 0 || moved) this->load_first(tile);
    const uint32_t before = k_ == 0 ? 0 : this->faults_before();
    if (thread_ == 0) s_.faults = before;
    if (const uint32_t beyond = this->load_queries()) atomicOr(&s_.faults, beyond);
    find_denominators();
    __syncthreads();
    const uint32_t faults = s_.faults;
    choose(tile, faults);
    // Blocks that still read those before may find these: they would add them.
    if (part_ == 0 && thread_ < requests_) {
      call_.faults[this->pair_of(thread_)] = faults >> thread_ & 1;
    }
    if (!kScores) this->pass_on(groups_, faults);
  }

 private:
  // kOwn lanes a row, each some of the parts: all are on their way at once.
  __device__ void find_denominators() {
    constexpr int kOwn = kBatchThreads / kBatchRows, kOnce = 20;
    const int row = thread_ / kOwn;
    const int group = row / kBatchGroup, v = row / 8 % kBatchOwn, n = row % 8;
    if (group >= groups_) return;
    const float2* parts = call_.sums + int64_t{list_} * kBatchParts * kBatchRows + row;
    float m = kLowestLogit, l = 0;
    for (int first = thread_ % kOwn; first < parts_; first += kOnce * kOwn) {
      float2 sums[kOnce];
#pragma unroll
      for (int i = 0; i < kOnce; ++i) {
        const int part = first + i * kOwn;
        sums[i] = part < parts_ ? __ldcg(parts + part * kBatchRows) : make_float2(kLowestLogit, 0);
      }
#pragma unroll
      for (int i = 0; i < kOnce; ++i) add_sums(m, l, sums[i].x, sums[i].y);
    }
    add_sums_of_lanes<kOwn>(m, l);
    if (thread_ % kOwn != 0) return;
    // Nothing alive: no logit will be compared with it.
    const float lse = l == 0 ? 0 : m + log2f(l);
    const bool is = this->has(group, v, n);
    s_.lse[row] = is ? lse + (kScores ? 0 : level_.threshold) : INFINITY;
    if (is && !(fabsf(lse) <= kMostLogit)) {
      atomicOr(&s_.faults, 1u << this->request_of(group, v, n));
    }
  }

  // Words of the part's clusters: who chose them; or scores.
  __device__ void choose(Tile& tile, uint32_t faults) {
    uint32_t* words = this->chosen_words(group_);
    Rows lse;
#pragma unroll
    for (int v = 0; v < kBatchOwn; ++v) {
      lse[v] = s_.lse[group_ * kBatchGroup + v * 8 + lane_ / 4];
    }
    const auto body = [&](int first, const Logits& d) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Rows y[2];  // of two clusters
        uint32_t alive[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool is = this->log_size(tile, first, i, e) > -INFINITY;
          alive[e] = is ? this->word(tile, first, i, e) & ~faults : 0;
#pragma unroll
          for (int v = 0; v < kBatchOwn; ++v) {
            y[e][v] = fmaf(d[v / 2][i][v % 2 * 2 + e], p_.scale, -lse[v]);
          }
        }
        const int cluster = this->cluster_of(first, i, 0);
        if constexpr (kScores) {
          put_scores(y, cluster, alive);
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            uint32_t word = pass(y[e]) & alive[e];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
            if (lane_ / 4 == 2 * i + e && cluster + e < end_) words[cluster + e] = word;
          }
        }
      }
    };
    this->template for_tiles<kScores>(tile, body, [&](int first) {
      if (lane_ < kBatchTile && first + lane_ < end_) words[first + lane_] = 0;
    });
  }

  // body(first row, how many, as a constant) for each request of which this lane has rows. All
  // lanes call it together. With more than 8 heads two lanes have rows of the same request.
  template <class Body>
  __device__ __forceinline__ void for_requests(const Body& body) const {
    const auto call = [&](auto heads) {
#pragma unroll
      for (int v = 0; v < kBatchOwn; v += heads.value) {
        if (v < kBatchOwn / 2 || !this->few_) body(v, heads);
      }
    };
    if (log_heads_ == 0) return call(std::integral_constant<int, 1>());
    if (log_heads_ == 1) return call(std::integral_constant<int, 2>());
    if (log_heads_ == 2) return call(std::integral_constant<int, 4>());
    call(std::integral_constant<int, 8>());
  }
  // The sum of 2^(y - top) over the heads of a request.
  template <class Heads>
  __device__ __forceinline__ float sum_over(Heads heads, const float* y, float top) const {
    float sum = ptx::ex2_approx(y[0] - top);
#pragma unroll
    for (int h = 1; h < heads.value; ++h) sum += ptx::ex2_approx(y[h] - top);
    return halves_ != 0 ? sum + __shfl_xor_sync(~0u, sum, 4) : sum;
  }

  // S, the mean over the heads, is compared with T as 2^(log2 S - log2 T) with 1. A ratio that
  // overflows is chosen, and one that underflows is far below.
  __device__ __forceinline__ uint32_t pass(const Rows& y) const {
    const auto enough = static_cast<float>(p_.group);
    uint32_t word = 0;
    for_requests([&](int v, auto heads) {
      const bool is = sum_over(heads, y + v, 0) >= enough;
      word |= is ? 1u << this->request_of(group_, v, lane_ / 4) : 0;
    });
    return word;
  }

  // log2 S, the mean over the heads of a request.
  template <class Heads>
  __device__ __forceinline__ float log_mean(Heads heads, const float* y) const {
    float top = y[0];
#pragma unroll
    for (int h = 1; h < heads.value; ++h) top = fmaxf(top, y[h]);
    if (halves_ != 0) top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
    return top + __log2f(sum_over(heads, y, top)) - log2f(static_cast<float>(p_.group));
  }
  // Writes scores of two clusters; -infinity for requests that are not alive.
  __device__ __forceinline__ void put_scores(const Rows (&y)[2], int cluster,
                                             const uint32_t (&alive)[2]) const {
    for_requests([&](int v, auto heads) {
      const float2 scores = make_float2(log_mean(heads, y[0] + v), log_mean(heads, y[1] + v));
      const int request = this->request_of(group_, v, lane_ / 4);
      if (request >= requests_ || cluster >= end_ || this->head_of(v, lane_ / 4) != 0) return;
      float* to = call_.scores + this->pair_of(request) * call_.score_stride() + cluster;
      const auto score = [&](int e, float own) {
        return (alive[e] >> request & 1) != 0 ? own : -INFINITY;
      };
      *reinterpret_cast<float2*>(to) = make_float2(score(0, scores.x), score(1, scores.y));
    });
  }

  BatchChoiceShared<kDim>& s_;
};

template <class Element, int kDim, bool kAll>
__global__ void __launch_bounds__(kBatchThreads, 2)
    batch_sums_kernel(const __grid_constant__ BatchLookup call, int level) {
  extern __shared__ __align__(16) char batch_memory[];
  auto& shared = *reinterpret_cast<BatchSumsShared<kDim>*>(batch_memory);
  BatchSums<Element, kDim, kAll>(call, level, shared).run();
}

template <class Element, int kDim, bool kScores>
__global__ void __launch_bounds__(kBatchThreads, 2)
    batch_choose_kernel(const __grid_constant__ BatchLookup call, int level) {
  extern __shared__ __align__(16) char batch_memory[];
  auto& shared = *reinterpret_cast<BatchChoiceShared<kDim>*>(batch_memory);
  BatchChoice<Element, kDim, kScores>(call, level, shared).run();
}

}  // namespace sqz::cuda
