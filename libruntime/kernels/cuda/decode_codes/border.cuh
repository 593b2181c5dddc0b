// The best of scored items until a number of keys is reached, in the order of choose_best()
// (libruntime/select/rule.h): by score, equal ones by place. Items are a block's own, or a team's.
#pragma once

#include "libruntime/kernels/cuda/decode_codes/shared.cuh"
#include "libruntime/kernels/cuda/decode_lookup/team.cuh"

namespace sqz::cuda {

// The border in digits of an item: first 1/16 of a score (log2), down to -64; then, 10 bits at a
// time, how far the score is below the greatest of that digit, and the place. So digits end at one
// item, and mostly after the second.
class CodedBorder {
 public:
  uint32_t left = 0;  // keys that the items at the border may have

  __device__ static uint32_t first_digit(float score) {
    return static_cast<uint32_t>(fminf(fmaxf(score * -16.0f, 0.0f), float{kDigitBins - 1}));
  }
  // kDigitBins: not among those that the next digit sorts.
  __device__ uint32_t digit_of(float score, uint32_t place) const {
    if (!(score > -INFINITY)) return kDigitBins;
    if (!begun_) return first_digit(score);
    if (first_digit(score) != first_) return kDigitBins;
    const uint64_t rest = rest_of(score, place);
    return rest >> shift_ == prefix_ ? rest >> next_ & (kDigitBins - 1) & mask() : kDigitBins;
  }
  __device__ void narrow(uint32_t digit) {
    if (!begun_) {
      begun_ = true;
      first_ = digit;
      // Scores are above 0 by rounding alone.
      top_ = digit == 0 ? rank_of(1.0f) : rank_of(digit * (-1.0f / 16));
      const uint32_t end = rank_of(digit + 1 == kDigitBins ? -3.4e38f : (digit + 1) * (-1.0f / 16));
      shift_ = 64 - __clz(static_cast<int>(top_ - end));
    } else {
      prefix_ = prefix_ << (shift_ - next_) | digit;
      shift_ = next_;
    }
    next_ = max(0, shift_ - 10);
  }
  __device__ bool at_end() const { return begun_ && shift_ == 0; }
  __device__ void take_all() { all_ = true; }

  // `nearest`: the item at the border is chosen if most of it is wanted.
  __device__ bool chooses(float score, uint32_t place, uint32_t size, bool nearest) const {
    if (!(score > -INFINITY)) return false;
    if (all_) return true;
    const uint32_t first = first_digit(score);
    if (first != first_) return first < first_;
    const uint64_t rest = rest_of(score, place) >> shift_;
    if (rest != prefix_) return rest < prefix_;
    return nearest ? 2 * left > size : left > 0;
  }

 private:
  __device__ uint64_t rest_of(float score, uint32_t place) const {
    return uint64_t{top_ - rank_of(score)} << 32 | place;
  }
  __device__ uint32_t mask() const { return (1u << (shift_ - next_)) - 1; }

  bool begun_ = false, all_ = false;
  uint32_t first_ = 0, top_ = 0;
  uint64_t prefix_ = 0;
  int shift_ = 64, next_ = 64;
};

template <int kDim>
class CodedSearch : protected LookupTeam<kCodedThreads> {
 protected:
  __device__ CodedSearch(const CodedParams& params, int team, CodedShared<kDim>& shared)
      : LookupTeam<kCodedThreads>(team, shared.team, params.lookup.exchange),
        c_(params),
        p_(params.lookup),
        s_(shared),
        pair_(static_cast<int>(blockIdx.x) / team),
        head_(pair_ % params.lookup.kv_heads) {}

  // Of `count` items score(i), size(i) and place(i); kTeam: of all blocks, every item of size 1.
  template <bool kTeam, class Score, class Size, class Place>
  __device__ CodedBorder find_border(uint32_t count, uint32_t wanted, const Score& score,
                                     const Size& size, const Place& place) {
    CodedBorder border;
    border.left = wanted;
#pragma unroll 1
    for (;;) {
      __syncthreads();
      for (int i = thread_; i < kDigitBins; i += kCodedThreads) s_.sizes[i] = s_.counts[i] = 0;
      if (thread_ == 0) s_.found[0] = kDigitBins;
      __syncthreads();
#pragma unroll 1
      for (uint32_t i = thread_; i < count; i += kCodedThreads) {
        const uint32_t digit = border.digit_of(score(i), place(i));
        if (digit >= kDigitBins) continue;
        atomicAdd(&s_.sizes[digit], size(i));
        if (!kTeam) atomicAdd(&s_.counts[digit], 1u);
      }
      __syncthreads();
      if (kTeam) add_team_digits();
      find_digit(border.left);
      if (s_.found[0] == kDigitBins) {  // there are no more than wanted
        border.take_all();
        break;
      }
      border.narrow(s_.found[0]);
      border.left -= s_.found[1];
      const uint32_t items = kTeam ? s_.sizes[s_.found[0]] : s_.counts[s_.found[0]];
      if (border.left == 0 || items == 1 || border.at_end()) break;
    }
    __syncthreads();
    return border;
  }

  const CodedParams& c_;
  const LookupParams& p_;
  CodedShared<kDim>& s_;
  const int pair_, head_;

 private:
  // s_.sizes over the team. An exchange by global memory.
  __device__ void add_team_digits() {
    if (team_ == 1) return;
    uint32_t* own = digits_of(rank_);
    for (int i = thread_; i < kDigitBins; i += kCodedThreads) own[i] = s_.sizes[i];
    sync_team();
    for (int i = thread_; i < kDigitBins; i += kCodedThreads) {
      uint32_t sum = 0;
#pragma unroll
      for (int rank = 0; rank < kMostTeam; ++rank) {
        sum += rank < team_ ? __ldcg(digits_of(rank) + i) : 0;
      }
      s_.sizes[i] = sum;
    }
    digits_turn_ ^= 1;
    __syncthreads();
  }
  __device__ uint32_t* digits_of(int rank) const {
    const int64_t block = static_cast<int>(blockIdx.x) - rank_ + rank;
    return c_.workspace.digits + (2 * block + digits_turn_) * kDigitBins;
  }

  // s_.found: the digit at which the sum of sizes passes `left`, and the sum before it.
  __device__ void find_digit(uint32_t left) {
    constexpr int kEach = kDigitBins / kCodedThreads;
    Sums own, all;
#pragma unroll
    for (int i = 0; i < kEach; ++i) own.a += s_.sizes[kEach * thread_ + i];
    uint32_t before = sums_before(own, all).a;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t size = s_.sizes[kEach * thread_ + i];
      if (before <= left && left < before + size) {
        s_.found[0] = kEach * thread_ + i;
        s_.found[1] = before;
      }
      before += size;
    }
    __syncthreads();
  }

  int digits_turn_ = 0;
};

}  // namespace sqz::cuda
