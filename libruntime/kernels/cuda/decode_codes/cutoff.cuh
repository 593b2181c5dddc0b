// Where a prefix of scored items ends that holds a number of keys, best first: in the order of
// choose_best() (libruntime/select/rule.h), by score, equal ones by place. Each block of a team has
// items of its own. The team adds up a histogram of scores, and compares the few items at the
// cutoff one by one.
#pragma once

#include "libruntime/kernels/cuda/decode_codes/shared.cuh"
#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"

namespace sqz::cuda {

// The radix digits of an item: first 1/16 of its score (log2), down to -64; then, 10 bits at a
// time, how far the score is below the greatest of that bin, and the place.
class CodedCutoff {
 public:
  // `nearest`: the item at the cutoff is chosen if most of it is wanted.
  __device__ CodedCutoff(bool wants, uint32_t wanted, bool nearest)
      : open_(wants), nearest_(nearest), wanted_(wanted), left_(wanted) {}

  // Not found so far.
  __device__ bool open() const { return open_; }
  __device__ uint32_t left() const { return left_; }

  __device__ static uint32_t first_bin(float score) {
    return score > -INFINITY
               ? static_cast<uint32_t>(fminf(fmaxf(score * -16.0f, 0.0f), float{kCodeBins - 1}))
               : kCodeBins;
  }
  __device__ uint64_t rest_of(float score, uint32_t place) const {
    return uint64_t{top_ - rank_of(score)} << 32 | place;
  }
  // Whether an item's bins so far are those of the cutoff.
  __device__ bool has(float score, uint32_t place) const {
    return first_bin(score) == first_ && has(rest_of(score, place));
  }
  __device__ bool has(uint64_t rest) const { return rest >> shift_ == prefix_; }
  // kCodeBins: not an item that has().
  __device__ uint32_t next_bin(uint64_t rest) const {
    return has(rest) ? rest >> next_ & ((1u << (shift_ - next_)) - 1) : kCodeBins;
  }
  __device__ uint32_t next_bin(float score, uint32_t place) const {
    return first_bin(score) == first_ ? next_bin(rest_of(score, place)) : kCodeBins;
  }

  // The next bin of the cutoff, and the keys of smaller ones.
  __device__ void narrow(uint32_t bin, uint32_t before) {
    left_ -= before;
    if (first_ == kCodeBins) {
      first_ = bin;
      // Scores are above 0 by rounding alone.
      top_ = bin == 0 ? rank_of(1.0f) : rank_of(bin * (-1.0f / 16));
      const uint32_t end = rank_of(bin + 1 == kCodeBins ? -3.4e38f : (bin + 1) * (-1.0f / 16));
      shift_ = 64 - __clz(static_cast<int>(top_ - end));
    } else {
      prefix_ = prefix_ << (shift_ - next_) | bin;
      shift_ = next_;
    }
    next_ = max(0, shift_ - 10);
  }
  // At an item that has(), with the keys of better ones that have().
  __device__ void end_at(uint64_t rest, uint32_t before, uint32_t size) {
    prefix_ = rest;
    shift_ = 0;
    left_ -= before;
    size_ = size;
    open_ = false;
  }
  // There are no more keys than are wanted.
  __device__ void take_all(uint32_t keys) {
    wanted_ = keys;
    left_ = size_ = 0;
    first_ = kCodeBins;
    open_ = false;
  }

  __device__ bool chooses(float score, uint32_t place) const {
    const uint32_t first = first_bin(score);
    if (first != first_) return first < first_;
    if (first == kCodeBins) return false;
    const uint64_t rest = rest_of(score, place);
    return rest < prefix_ || (rest == prefix_ && takes_last());
  }
  // That are chosen.
  __device__ uint32_t keys() const { return wanted_ - left_ + (takes_last() ? size_ : 0); }

 private:
  __device__ bool takes_last() const { return nearest_ ? 2 * left_ > size_ : left_ > 0; }

  bool open_, nearest_;
  uint32_t wanted_, left_;  // left: what the item at the cutoff may have
  uint32_t first_ = kCodeBins, top_ = 0, size_ = 0;
  uint64_t prefix_ = 0;
  int shift_ = 64, next_ = 64;
};

template <int kDim>
class CodedSearch : protected LookupTeam<kCodedThreads> {
 protected:
  static constexpr int kEach = kCodeBins / kCodedThreads;
  // Keys of the team's items by bin: kEach neighbouring ones a thread.
  struct RadixBins {
    uint32_t sizes[kEach];
    uint32_t extra;
  };

  __device__ CodedSearch(const CodedParams& params, int team, CodedShared<kDim>& shared)
      : LookupTeam<kCodedThreads>(team, shared.team, params.lookup.exchange),
        c_(params),
        p_(params.lookup),
        s_(shared),
        pair_(static_cast<int>(blockIdx.x) / team),
        head_(pair_ % params.lookup.kv_heads),
        space_(params.workspace.search[pair_]) {}

  // Of this block's `count` items bin(i), or kCodeBins, and size(i); and of each thread's extra.
  template <class RadixBin, class Size>
  __device__ RadixBins add_bins(uint32_t count, const RadixBin& bin, const Size& size,
                                uint32_t extra = 0) {
    uint32_t* sizes = s_.search.sizes;
#pragma unroll 1
    for (int i = thread_; i <= kCodeBins; i += kCodedThreads) sizes[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = thread_; i < count; i += kCodedThreads) {
      const uint32_t to = bin(i);
      if (to < kCodeBins) atomicAdd(&sizes[to], size(i));
    }
    if (extra > 0) atomicAdd(&sizes[kCodeBins], extra);
    __syncthreads();
    uint32_t* team = space_.bins[turn_of_bins_];
#pragma unroll 1
    for (int i = thread_; i <= kCodeBins; i += kCodedThreads) {
      if (sizes[i] > 0) atomicAdd(team + i, sizes[i]);
    }
    sync_team();
    RadixBins out;
#pragma unroll
    for (int i = 0; i < kEach; ++i) out.sizes[i] = __ldcg(team + kEach * thread_ + i);
    out.extra = __ldcg(team + kCodeBins);
    // All have read the one before.
    turn_of_bins_ ^= 1;
    clear_bins();
    return out;
  }
  // Leaves the histograms as they were found. All of the team have read the last one.
  __device__ void end_search() {
    turn_of_bins_ ^= 1;
    clear_bins();
    if (rank_ == 0 && thread_ == 0) space_.words = 0;
  }

  // Ends the open cutoffs, from the team's `bins` of first_bin(). Items have a score(i), a
  // size(i) and a place(i) that no other of the team has.
  template <int kCutoffs, class Score, class Size, class Place>
  __device__ void find(CodedCutoff (&cutoffs)[kCutoffs], RadixBins bins, uint32_t count,
                       const Score& score, const Size& size, const Place& place) {
#pragma unroll 1
    for (bool first = true;; first = false) {
      bool open = false;
#pragma unroll
      for (CodedCutoff& cutoff : cutoffs) {
        if (!cutoff.open()) continue;
        if (!first) {
          bins = add_bins(
              count, [&](uint32_t i) { return cutoff.next_bin(score(i), place(i)); }, size);
        }
        find_bin(cutoff, bins);
        open = open || cutoff.open();
      }
      if (!open) return;
      if (thread_ < kCutoffs) s_.search.count[thread_] = 0;
      __syncthreads();
#pragma unroll
      for (int b = 0; b < kCutoffs; ++b) {
        if (cutoffs[b].open()) gather(b, cutoffs[b], count, score, size, place);
      }
      __syncthreads();
      if (thread_ < kCutoffs) own_words()[thread_] = s_.search.count[thread_];
      sync_team();
      open = false;
#pragma unroll
      for (int b = 0; b < kCutoffs; ++b) {
        if (cutoffs[b].open()) compare_items(b, cutoffs[b]);
        open = open || cutoffs[b].open();
      }
      next_turn();
      if (!open) return;
    }
  }

  const CodedParams& c_;
  const LookupParams& p_;
  CodedShared<kDim>& s_;
  const int pair_, head_;
  CodedSearchSpace& space_;

 private:
  __device__ void clear_bins() {
#pragma unroll 1
    for (int i = rank_ * kCodedThreads + thread_; i <= kCodeBins; i += team_ * kCodedThreads) {
      space_.bins[turn_of_bins_][i] = 0;
    }
  }

  // The bin at which the sum of sizes passes what is left.
  __device__ void find_bin(CodedCutoff& cutoff, const RadixBins& bins) {
    if (thread_ == 0) s_.search.found[0] = kCodeBins;
    Sums own, all;
#pragma unroll
    for (int i = 0; i < kEach; ++i) own.a += bins.sizes[i];
    uint32_t before = sums_before(own, all).a;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (before <= cutoff.left() && cutoff.left() < before + bins.sizes[i]) {
        s_.search.found[0] = kEach * thread_ + i;
        s_.search.found[1] = before;
      }
      before += bins.sizes[i];
    }
    __syncthreads();
    if (s_.search.found[0] == kCodeBins) {
      cutoff.take_all(all.a);
    } else {
      cutoff.narrow(s_.search.found[0], s_.search.found[1]);
    }
    __syncthreads();
  }

  // What has the cutoff's bins, for the team.
  template <class Score, class Size, class Place>
  __device__ void gather(int which, const CodedCutoff& cutoff, uint32_t count, const Score& score,
                         const Size& size, const Place& place) {
    const uint32_t most = kCutoffItems / team_;
#pragma unroll 1
    for (uint32_t i = thread_; i < count; i += kCodedThreads) {
      if (!cutoff.has(score(i), place(i))) continue;
      const uint32_t at = atomicAdd(&s_.search.count[which], 1u);
      if (at < most) {
        space_.items[which][rank_ * most + at] = {cutoff.rest_of(score(i), place(i)), size(i), 0};
      }
    }
  }

  // Ends the cutoff if the blocks had room for its items.
  __device__ void compare_items(int which, CodedCutoff& cutoff) {
    constexpr int kOwn = kCutoffItems / kCodedThreads;
    const uint32_t most = kCutoffItems / team_;
    const uint32_t received = lane_ < team_ ? this->received(lane_, which) : 0;
    CodedItem own[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const uint32_t i = thread_ + k * kCodedThreads, rank = i / most;
      const uint4 item = __ldcg(reinterpret_cast<const uint4*>(space_.items[which] + i));
      const uint32_t count = __shfl_sync(~0u, received, rank % 32);
      own[k] = {uint64_t{item.y} << 32 | item.x, i - rank * most < count ? item.z : 0, 0};
    }
    if (__ballot_sync(~0u, received > most) != 0) return;
    const auto has = [&](int k) { return own[k].size > 0 && cutoff.has(own[k].rest); };
    while (!list_few(own, has)) {
      uint32_t* sizes = s_.search.sizes;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sizes[kEach * thread_ + i] = 0;
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        if (has(k)) atomicAdd(&sizes[cutoff.next_bin(own[k].rest)], own[k].size);
      }
      __syncthreads();
      RadixBins bins;
#pragma unroll
      for (int i = 0; i < kEach; ++i) bins.sizes[i] = sizes[kEach * thread_ + i];
      find_bin(cutoff, bins);
    }
    // Every warp looks at all; a lane has one.
    const CodedItem item = s_.search.few[lane_];
    const bool is = static_cast<uint32_t>(lane_) < s_.search.count[0];
    uint32_t before = 0;
    for (uint32_t j = 0; j < s_.search.count[0]; ++j) {
      const CodedItem other = s_.search.few[j];
      before += other.rest < item.rest ? other.size : 0;
    }
    const uint32_t last =
        __ballot_sync(~0u, is && before <= cutoff.left() && cutoff.left() < before + item.size);
    const int lane = __ffs(static_cast<int>(last)) - 1;
    cutoff.end_at(uint64_t{__shfl_sync(~0u, static_cast<uint32_t>(item.rest >> 32), lane)} << 32 |
                      __shfl_sync(~0u, static_cast<uint32_t>(item.rest), lane),
                  __shfl_sync(~0u, before, lane), __shfl_sync(~0u, item.size, lane));
    __syncthreads();
  }

  // The items own[k] of all threads that has(k), in s_.search.few if there is room for them.
  template <int kOwn, class Has>
  __device__ bool list_few(const CodedItem (&own)[kOwn], const Has& has) {
    if (thread_ == 0) s_.search.count[0] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      if (!has(k)) continue;
      const uint32_t at = atomicAdd(&s_.search.count[0], 1u);
      if (at < kFewItems) s_.search.few[at] = own[k];
    }
    __syncthreads();
    return s_.search.count[0] <= kFewItems;
  }

  int turn_of_bins_ = 0;
};

}  // namespace sqz::cuda
