// From scores to runs: which clusters of a level are chosen, and where their keys are. Thread t has
// clusters [t each, (t + 1) each) of its block's slice of what is alive.
#pragma once

#include "libruntime/kernels/cuda/decode/lookup/cutoff.cuh"

namespace sqz::cuda {

// One thread of a team, when its blocks write runs: where these end, totals, counters. `all`: runs
// and keys; `centroids`: read to decide, if they are not counted elsewhere.
__device__ inline void end_lists(const RunLists& lists, const LookupLayer& layer, int64_t pair,
                                 int head, Sums all, uint32_t centroids) {
  lists.before[pair * (lists.capacity + 1) + all.a] = all.b;
  lists.totals[pair] = {all.a, all.b, 0, layer.exact};
  if (head == 0) atomicAdd(&layer.counters[0], 1ull);
  atomicAdd(&layer.counters[1], static_cast<unsigned long long>(all.b));
  if (centroids == 0) return;
  atomicAdd(&layer.counters[2], static_cast<unsigned long long>(centroids));
}

// Ends a pair with a logit that is NaN or infinite: nothing is selected, and nothing counted.
__device__ inline void end_with_fault(const LookupParams& params, int64_t pair) {
  params.lists.totals[pair] = {0, 0, 1, 0};
}

// At most kMostOfThread clusters a thread.
class Choice : protected CutoffSearch {
 protected:
  // `layer`: of the pair. `cutoff`: cutoff_bytes() of shared memory, for rules that count.
  __device__ Choice(const LookupParams& params, const LookupLayer& layer, int team, int pair,
                    Shared& shared, char* cutoff)
      : CutoffSearch(team, shared, cutoff),
        p_(params),
        layer_(layer),
        pair_(pair),
        head_(pair_ % params.kv_heads) {}

  // The j-th cluster of the slice.
  __device__ uint32_t cluster_of(const uint32_t* alive, uint32_t j) const {
    return alive == nullptr ? begin_ + j : __ldcg(alive + begin_ + j);
  }
  __device__ uint32_t each() const { return max(1u, (size_ + kThreads - 1) / kThreads); }
  // How many clusters this thread has.
  __device__ uint32_t own_count() const {
    const uint32_t first = thread_ * each();
    return first < size_ ? min(each(), size_ - first) : 0;
  }

  // pass() compares with the level's threshold; combine() comes before score(i). `window`: where
  // the cutoff of rules that count is looked for first.
  template <class Pass, class Combine, class Score>
  __device__ ChosenBits choose(bool budget, const LookupLevel& level, const uint32_t* alive,
                               bool finest, uint32_t wanted, Window window, const Pass& pass,
                               const Combine& combine, const Score& score) {
    if (!budget) return pass();
    const uint32_t first = thread_ * each();
    const auto keys = [&](uint32_t i) -> uint32_t {
      if (finest) return spans_[first + i].y - spans_[first + i].x;
      return __ldg(level.sizes + static_cast<int64_t>(head_) * level.clusters +
                   cluster_of(alive, first + i));
    };
    if (!finest) {
      const ChosenBits chosen = pass();
      Sums own, all;
      chosen.for_each([&](uint32_t i) { own.b += keys(i); });
      sums_before(own, all);
      if (all.b >= wanted) return chosen;
    }
    combine();
    return best(own_count(), wanted, finest, window, score, keys);
  }

  // Calls body(span) for every chosen cluster of this thread, which is never empty.
  template <class Body>
  __device__ void for_each(const ChosenBits& chosen, const Body& body) const {
    const uint32_t first = thread_ * each();
    chosen.for_each([&](uint32_t i) { body(spans_[first + i]); });
  }

  // The children of what was chosen, for the next level; how many.
  __device__ uint32_t list_children(const ChosenBits& chosen, uint32_t* list) {
    Sums own, all;
    for_each(chosen, [&](uint2 span) { own.b += span.y - span.x; });
    uint32_t at = sums_before(own, all).b;
    for_each(chosen, [&](uint2 span) {
#pragma unroll 1
      for (uint32_t child = span.x; child < span.y; ++child) list[at++] = child;
    });
    meet();
    return all.b;
  }

  // Chosen clusters as runs, that end at the latest where a warp's clusters end. Returns the keys
  // of the pair.
  __device__ uint32_t emit(const ChosenBits& chosen) {
    // Where the clusters of the lane before end, if its last is chosen.
    uint32_t last = ~0u;
    if (own_count() == each() && chosen.has(each() - 1)) {
      last = spans_[thread_ * each() + each() - 1].y;
    }
    last = __shfl_up_sync(~0u, last, 1);
    if (lane_ == 0) last = ~0u;
    Sums own, all;
    uint32_t end = last;
    for_each(chosen, [&](uint2 span) {
      own.a += span.x != end ? 1 : 0;
      own.b += span.y - span.x;
      end = span.y;
    });
    Sums at = sums_before(own, all);
    const RunLists& lists = p_.lists;
    uint32_t* run_first = lists.first + pair_ * (lists.capacity + 1);
    uint32_t* run_before = lists.before + pair_ * (lists.capacity + 1);
    end = last;
    for_each(chosen, [&](uint2 span) {
      if (span.x != end) {
        run_first[at.a] = span.x;
        run_before[at.a++] = at.b;
      }
      end = span.y;
      at.b += span.y - span.x;
    });
    if (rank_ == 0 && thread_ == 0) end_lists(lists, layer_, pair_, head_, all, centroids_);
    return all.b;
  }

  const LookupParams& p_;
  const LookupLayer& layer_;
  const int pair_, head_;
  uint2* spans_ = nullptr;         // [slice] where children, or slots, begin and end
  uint32_t begin_ = 0, size_ = 0;  // of what is alive, this block's
  uint32_t centroids_ = 0;         // vectors that were read to decide
};

}  // namespace sqz::cuda
