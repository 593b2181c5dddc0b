// From scores to runs: which clusters of a level are chosen, and where their keys are. Thread t has
// clusters [t each, (t + 1) each) of its block's slice of what is alive.
#pragma once

#include <type_traits>

#include "libruntime/kernels/cuda/decode/lookup/cutoff.cuh"

namespace sqz::cuda {

// Which of a thread's clusters are chosen: a bit for each of up to 32,
struct ChosenBits {
  uint32_t bits = 0;

  __device__ void set(uint32_t i, bool is) { bits |= is ? 1u << i : 0; }
  __device__ bool has(uint32_t i) const { return (bits >> i & 1) != 0; }
  // body(i) for all of the first `count`.
  template <class Body>
  __device__ void for_each(uint32_t, const Body& body) const {
#pragma unroll 1
    for (uint32_t left = bits; left != 0; left &= left - 1) body(__ffs(left) - 1);
  }
};
// or a word for each, in memory.
struct ChosenWords {
  uint32_t* words;

  __device__ void set(uint32_t i, bool is) { words[i] = is ? 1 : 0; }
  __device__ bool has(uint32_t i) const { return words[i] != 0; }
  template <class Body>
  __device__ void for_each(uint32_t count, const Body& body) const {
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      if (has(i)) body(i);
    }
  }
};

// kRoomy: slices are in shared memory, at most kMostOfThread clusters a thread.
template <class Team, bool kRoomy>
class Choice : protected CutoffSearch<Team> {
 protected:
  using Window = typename CutoffSearch<Team>::Window;
  using Chosen = std::conditional_t<kRoomy, ChosenBits, ChosenWords>;
  using Team::kThreads;
  using Team::lane_;
  using Team::rank_;
  using Team::team_;
  using Team::thread_;

  // `cutoff`: cutoff_bytes() of shared memory, for rules that count.
  __device__ Choice(const LookupParams& params, int team, int pair, typename Team::Shared& shared,
                    char* cutoff)
      : CutoffSearch<Team>(team, shared, params.exchange, cutoff),
        p_(params),
        pair_(pair),
        head_(pair_ % params.kv_heads) {}

  // Of the slice's j-th.
  __device__ uint32_t cluster_of(const uint32_t* alive, uint32_t j) const {
    return alive == nullptr ? begin_ + j : __ldcg(alive + begin_ + j);
  }
  // Where its children, or slots, begin and end.
  __device__ uint2 span(const LookupLevel& level, const uint32_t* alive, uint32_t j) const {
    if (kRoomy || spans_ != nullptr) return spans_[j];
    const uint32_t* at =
        level.offsets + static_cast<int64_t>(head_) * (level.clusters + 1) + cluster_of(alive, j);
    return make_uint2(at[0], at[1]);
  }

  __device__ uint32_t each() const { return max(1u, (size_ + kThreads - 1) / kThreads); }
  // How many clusters this thread has.
  __device__ uint32_t own_count() const {
    const uint32_t first = thread_ * each();
    return first < size_ ? min(each(), size_ - first) : 0;
  }
  __device__ Chosen none() const {
    if constexpr (kRoomy) {
      return {};
    } else {
      return {words_ + thread_ * each()};
    }
  }

  // pass() compares with the level's threshold; combine() comes before score(i). `window`: where
  // the cutoff of rules that count is looked for first.
  template <class Pass, class Combine, class Score>
  __device__ Chosen choose(LookupRule rule, const LookupLevel& level, const uint32_t* alive,
                           bool finest, uint32_t wanted, Window window, const Pass& pass,
                           const Combine& combine, const Score& score) {
    if (rule == LookupRule::kThreshold) return pass();
    const uint32_t first = thread_ * each();
    const auto keys = [&](uint32_t i) -> uint32_t {
      if (!kRoomy && rule == LookupRule::kTop) return 1;
      if (finest) {
        const uint2 own = span(level, alive, first + i);
        return own.y - own.x;
      }
      return __ldg(level.sizes + static_cast<int64_t>(head_) * level.clusters +
                   cluster_of(alive, first + i));
    };
    if (!finest) {
      const Chosen chosen = pass();
      Sums own, all;
      chosen.for_each(own_count(), [&](uint32_t i) { own.b += keys(i); });
      this->sums_before(own, all);
      if (all.b >= wanted) return chosen;
    }
    combine();
    return this->best(none(), own_count(), wanted, finest && rule == LookupRule::kBudget, window,
                      score, keys);
  }

  // Calls body(span) for every chosen cluster of this thread that is not empty: of clusters those
  // never are, of pages and buckets they may be.
  template <class Body>
  __device__ void for_each(const Chosen& chosen, const LookupLevel& level, const uint32_t* alive,
                           const Body& body) const {
    const uint32_t first = thread_ * each();
    chosen.for_each(own_count(), [&](uint32_t i) {
      const uint2 own = span(level, alive, first + i);
      if (kRoomy || own.y > own.x) body(own);
    });
  }

  // The children of what was chosen, for the next level; how many.
  __device__ uint32_t list_children(const Chosen& chosen, const LookupLevel& level,
                                    const uint32_t* alive, uint32_t* list) {
    Sums own, all;
    for_each(chosen, level, alive, [&](uint2 span) { own.b += span.y - span.x; });
    uint32_t at = this->sums_before(own, all).b;
    for_each(chosen, level, alive, [&](uint2 span) {
#pragma unroll 1
      for (uint32_t child = span.x; child < span.y; ++child) list[at++] = child;
    });
    this->meet();
    return all.b;
  }

  // Chosen clusters as runs, that end at the latest where a warp's clusters end.
  __device__ void emit(const Chosen& chosen, const LookupLevel& level, const uint32_t* alive) {
    // Where the clusters of the lane before end, if its last is chosen.
    uint32_t last = ~0u;
    if (own_count() == each() && chosen.has(each() - 1)) {
      const uint2 own = span(level, alive, thread_ * each() + each() - 1);
      if (kRoomy || own.y > own.x) last = own.y;
    }
    last = __shfl_up_sync(~0u, last, 1);
    if (lane_ == 0) last = ~0u;
    Sums own, all;
    uint32_t end = last;
    for_each(chosen, level, alive, [&](uint2 span) {
      own.a += span.x != end ? 1 : 0;
      own.b += span.y - span.x;
      end = span.y;
    });
    Sums at = this->sums_before(own, all);
    const RunLists& lists = p_.lists;
    uint32_t* run_first = lists.first + pair_ * (lists.capacity + 1);
    uint32_t* run_before = lists.before + pair_ * (lists.capacity + 1);
    uint32_t* marks = lists.marks + pair_ * lists.mark_capacity;
    end = last;
    for_each(chosen, level, alive, [&](uint2 span) {
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
    if (rank_ == 0 && thread_ == 0) end_lists(p_, pair_, head_, all, centroids_);
  }

  const LookupParams& p_;
  const int pair_, head_;
  uint2* spans_ = nullptr;         // [slice] in shared memory, or null
  uint32_t* words_ = nullptr;      // [slice] unless kRoomy: which are chosen
  uint32_t begin_ = 0, size_ = 0;  // of what is alive, this block's
  uint32_t centroids_ = 0;         // vectors that were read to decide
};

}  // namespace sqz::cuda
