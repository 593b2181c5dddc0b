// From scores to runs: which of the scored clusters of a pair are chosen, and where their keys are.
#pragma once

#include "libruntime/kernels/cuda/decode_lookup/kernel.h"
#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"
#include "libruntime/kernels/cuda/decode_lookup/team.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"

namespace sqz::cuda {

// Of a team that has scored a level: each block knows the scores of its slice of what is alive.
class LookupRules : protected LookupTeam<kLookupThreads> {
 protected:
  __device__ LookupRules(const LookupParams& params, int team, int pair, RulesShared& shared)
      : LookupTeam<kLookupThreads>(team, shared.team, params.exchange),
        p_(params),
        rules_(shared),
        pair_(pair),
        head_(pair % params.kv_heads) {}

  __device__ static uint32_t cluster_of(const uint32_t* alive, uint32_t j) {
    return alive == nullptr ? j : __ldcg(alive + j);
  }

  // Where the children, or slots, of the slice's clusters begin and end: under way with their
  // centroids.
  __device__ void fetch_spans(const LookupLevel& level, const uint32_t* alive) const {
    if (spans_ == nullptr) return;
    const uint32_t* offsets = level.offsets + static_cast<int64_t>(head_) * (level.clusters + 1);
#pragma unroll 1
    for (uint32_t j = begin_ + thread_; j < end_; j += kLookupThreads) {
      const uint32_t* from = offsets + cluster_of(alive, j);
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(spans_ + (j - begin_)));
      ptx::cp_async_4(to, from);
      ptx::cp_async_4(to + 4, from + 1);
    }
    ptx::cp_async_commit_group();
  }

  __device__ uint2 span_of(const LookupLevel& level, const uint32_t* alive, uint32_t j) const {
    if (spans_ != nullptr) return spans_[j - begin_];
    const uint32_t* at =
        level.offsets + static_cast<int64_t>(head_) * (level.clusters + 1) + cluster_of(alive, j);
    return make_uint2(at[0], at[1]);
  }

  // ---- Rules. What is not chosen gets score -infinity.

  __device__ static uint32_t size_of(const LookupLevel& level, int head, uint32_t cluster) {
    return level.sizes == nullptr
               ? 1
               : level.sizes[static_cast<int64_t>(head) * level.clusters + cluster];
  }

  __device__ void choose(const LookupLevel& level, const uint32_t* alive, bool finest) {
    const uint32_t wanted = p_.rule == LookupRule::kThreshold ? 0 : p_.wanted[head_];
    if (p_.rule != LookupRule::kThreshold && finest) {
      best(level, alive, wanted, p_.rule == LookupRule::kBudget);
      return;
    }
    uint32_t kept = 0;
    if (p_.rule != LookupRule::kThreshold) {
#pragma unroll 1
      for (uint32_t j = begin_ + thread_; j < end_; j += kLookupThreads) {
        if (passes(level, scores_[j])) kept += size_of(level, head_, cluster_of(alive, j));
      }
      Sums all;
      team_sums(block_sums({kept, 0}), all);
      if (all.a < wanted) {
        best(level, alive, wanted, false);
        return;
      }
    }
#pragma unroll 1
    for (uint32_t j = begin_ + thread_; j < end_; j += kLookupThreads) {
      if (!passes(level, scores_[j])) scores_[j] = -INFINITY;
    }
    __syncthreads();
  }

  __device__ static bool passes(const LookupLevel& level, float score) {
    return score >= level.threshold && score > -INFINITY;
  }

  // Best first until `wanted` is reached: to the nearest, or until it is passed. Finds the score at
  // the border digit by digit, from sums of sizes by digit; equal scores go in the order of j.
  __device__ void best(const LookupLevel& level, const uint32_t* alive, uint32_t wanted,
                       bool nearest) {
    uint32_t prefix = 0, mask = 0, left = wanted;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
      __syncthreads();
      for (int i = thread_; i < kDigits; i += kLookupThreads) rules_.histogram[i] = 0;
      __syncthreads();
#pragma unroll 1
      for (uint32_t j = begin_ + thread_; j < end_; j += kLookupThreads) {
        const uint32_t rank = rank_of(scores_[j]);
        if (scores_[j] > -INFINITY && (rank & mask) == prefix) {
          atomicAdd(&rules_.histogram[kDigits - 1 - (rank >> shift & 255)],
                    size_of(level, head_, cluster_of(alive, j)));
        }
      }
      __syncthreads();
      for (int i = thread_; i < kDigits; i += kLookupThreads) own_words()[i] = rules_.histogram[i];
      sync_team();
      for (int i = thread_; i < kDigits; i += kLookupThreads) {
        uint32_t sum = 0;
#pragma unroll
        for (int r = 0; r < kMostTeam; ++r) sum += r < team_ ? told(r, i) : 0;
        rules_.histogram[i] = sum;
      }
      next_turn();
      __syncthreads();
      const uint2 border = find_border(rules_.histogram, lane_, left);
      if (border.x == kDigits) return;  // there are no more than wanted
      left = border.y;
      prefix |= (kDigits - 1 - border.x) << shift;
      mask |= 255u << shift;
    }
    settle(level, alive, prefix, left, nearest);
  }

  __device__ void settle(const LookupLevel& level, const uint32_t* alive, uint32_t border,
                         uint32_t left, bool nearest) {
    const auto tie = [&](uint32_t j) {
      return j < end_ && scores_[j] > -INFINITY && rank_of(scores_[j]) == border
                 ? size_of(level, head_, cluster_of(alive, j))
                 : 0;
    };
    uint32_t own = 0;
#pragma unroll 1
    for (uint32_t j = begin_ + thread_; j < end_; j += kLookupThreads) own += tie(j);
    Sums all;
    uint32_t before = team_sums(block_sums({own, 0}), all).a;
#pragma unroll 1
    for (uint32_t tile = begin_; tile < end_; tile += kLookupThreads) {
      const uint32_t j = tile + thread_;
      const uint32_t size = tie(j);
      Sums tile_sums;
      const uint32_t at = before + sums_before({size, 0}, tile_sums).a;
      before += tile_sums.a;
      if (j >= end_) continue;
      const bool chosen = size == 0 ? rank_of(scores_[j]) > border
                                    : at < left && (!nearest || 2 * (left - at) > size);
      if (!chosen) scores_[j] = -INFINITY;
    }
    __syncthreads();
  }

  // ---- What was chosen.

  // The children of what was chosen, for the next level; how many.
  __device__ uint32_t list_children(const LookupLevel& level, const uint32_t* alive,
                                    uint32_t* list) {
    const auto children = [&](uint32_t j, uint32_t& first) -> uint32_t {
      if (j >= end_ || !(scores_[j] > -INFINITY)) return 0;
      const uint2 span = span_of(level, alive, j);
      first = span.x;
      return span.y - span.x;
    };
    uint32_t own = 0, first = 0;
#pragma unroll 1
    for (uint32_t j = begin_ + thread_; j < end_; j += kLookupThreads) own += children(j, first);
    Sums all;
    uint32_t before = team_sums(block_sums({own, 0}), all).a;
#pragma unroll 1
    for (uint32_t tile = begin_; tile < end_; tile += kLookupThreads) {
      const uint32_t count = children(tile + thread_, first);
      Sums tile_sums;
      const uint32_t at = before + sums_before({count, 0}, tile_sums).a;
      before += tile_sums.a;

#pragma unroll 1
      for (uint32_t i = 0; i < count; ++i) list[at + i] = first + i;
    }
    sync_team();
    return all.a;
  }

  __device__ Chosen chosen_at(const LookupLevel& level, const uint32_t* alive, uint32_t j) const {
    Chosen out;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool is = j + i < end_ && scores_[j + i] > -INFINITY;
      const uint2 span = is ? span_of(level, alive, j + i) : make_uint2(0, 0);
      out.first[i] = span.x;
      out.length[i] = span.y - span.x;
    }
    // The end of the lane before: a run goes on where its last slot is followed by this one's
    // first.
    uint32_t end = __shfl_up_sync(
        ~0u, out.length[kItems - 1] > 0 ? out.first[kItems - 1] + out.length[kItems - 1] : ~0u, 1);
    if (lane_ == 0) end = ~0u;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      out.begins[i] = out.length[i] > 0 && out.first[i] != end;
      end = out.length[i] > 0 ? out.first[i] + out.length[i] : ~0u;
    }
    return out;
  }

  __device__ void emit(const LookupLevel& level, const uint32_t* alive) {
    constexpr uint32_t kTile = kLookupThreads * kItems;
    Sums all, before, tile_sums;
    if (end_ - begin_ <= kTile) {
      const Chosen chosen = chosen_at(level, alive, begin_ + thread_ * kItems);
      Sums at = sums_before(chosen.sums(), tile_sums);
      before = team_sums(tile_sums, all);
      write_runs(chosen, {at.a + before.a, at.b + before.b});
    } else {
      // Once to count, once to write: the same instructions, fetched once.
#pragma unroll 1
      for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
        for (uint32_t tile = begin_; tile < end_; tile += kTile) {
          const Chosen chosen = chosen_at(level, alive, tile + thread_ * kItems);
          const Sums at = sums_before(chosen.sums(), tile_sums);
          if (pass != 0) write_runs(chosen, {at.a + before.a, at.b + before.b});
          before.a += tile_sums.a;
          before.b += tile_sums.b;
        }
        if (pass == 0) before = team_sums(before, all);
      }
    }
    if (rank_ == 0 && thread_ == 0) end_lists(p_, pair_, head_, all, centroids_);
  }

  // `at`: runs and keys before those of this thread.
  __device__ void write_runs(const Chosen& chosen, Sums at) const {
    const RunLists& lists = p_.lists;
    uint32_t* run_first = lists.first + pair_ * (lists.capacity + 1);
    uint32_t* run_before = lists.before + pair_ * (lists.capacity + 1);
    uint32_t* marks = lists.marks + pair_ * lists.mark_capacity;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (chosen.begins[i]) {
        run_first[at.a] = chosen.first[i];
        run_before[at.a++] = at.b;
      }
      const uint32_t end = at.b + chosen.length[i];
#pragma unroll 1
      for (uint32_t m = (at.b + kMarkKeys - 1) / kMarkKeys; m * kMarkKeys < end; ++m) {
        marks[m] = at.a - 1;
      }
      at.b = end;
    }
  }

  const LookupParams& p_;
  RulesShared& rules_;
  const int pair_, head_;
  uint2* spans_ = nullptr;        // [slice] in shared memory, or null
  float* scores_ = nullptr;       // score of j: scores_[j]
  uint32_t begin_ = 0, end_ = 0;  // of what is alive, this block's
  uint32_t centroids_ = 0;        // vectors that were read to decide
};

}  // namespace sqz::cuda
