// Rules that count: the best clusters until a number of keys, or of pages, is reached.
#pragma once

#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"

namespace sqz::cuda {

struct Digits {
  alignas(16) uint32_t keys[kDigits];
  uint32_t clusters[kDigits];
};

// In shared memory; behind it what a team keeps there of its members' digits.
struct BorderShared {
  Digits own[2];  // of this block, in turn; the one that comes next is zero
  Digits all;     // of the team
};
template <class Team>
constexpr int64_t border_bytes(int team) {
  return static_cast<int64_t>(sizeof(BorderShared)) + Team::digit_bytes(team);
}

// Finds the score at the border digit by digit, from the keys by digit over the whole team. The
// first digits are those around a score that is expected there: mostly one of them holds the
// border, and among the 256 digits of that one the cluster at the border is alone.
template <class Team>
class BorderSearch : protected Team {
 public:
  // `border`: border_bytes() of shared memory, for best().
  __device__ BorderSearch(int team, typename Team::Shared& shared, TeamExchange* exchange,
                          char* border)
      : Team(team, shared, exchange, reinterpret_cast<uint2*>(border + sizeof(BorderShared))),
        border_(*reinterpret_cast<BorderShared*>(border)) {}

 protected:
  using Team::thread_;
  static_assert(Team::kThreads % kDigits == 0);

  // Before the first best(), a barrier between.
  __device__ void clear_digits() { clear(border_.own[0]); }

  // Ranks [high - 256 2^shift + 1, high], of which digit 0 has the greatest; of one digit, when
  // narrow() has been called.
  struct Window {
    uint32_t high;
    int shift;
    bool open;  // greater ranks count as digit 0

    // 1/16 a digit for scores of -16 to -8 (log2), twice that below, half above.
    __device__ static Window around(float score) {
      const uint32_t rank = rank_of(score), half = kDigits / 2 << 16;
      return {rank > ~half ? ~0u : rank + half, 16, true};
    }
    __device__ static Window everything() { return {~0u, 24, false}; }
    __device__ static Window below_all() { return {0, 0, false}; }
    __device__ void narrow(uint32_t digit) { high -= digit << shift; }
    __device__ void split() {
      shift -= 8;
      open = false;
    }
    // kDigits or more: not in it.
    __device__ uint32_t digit_of(uint32_t rank) const {
      if (rank > high) return open ? 0 : kDigits;
      return high - rank >> shift;
    }
  };

  // Adds to `chosen` which of this thread's clusters are among the best: until `wanted` keys are
  // passed, or, if `nearest`, with or without the last cluster, whichever is nearer. score(i) and
  // keys(i) of the i-th of `count`; those of score -infinity are not there. Equal scores go by
  // their place. `window`: where the border is looked for first.
  template <class Chosen, class Score, class Keys>
  __device__ Chosen best(Chosen chosen, int count, uint32_t wanted, bool nearest, Window window,
                         const Score& score, const Keys& keys) {
    uint32_t left = wanted, clusters = 0;
#pragma unroll 1
    for (;;) {
      add_digits(count, window, score, keys);
      const uint2 border = find_border(border_.all.keys, this->lane_, left);
      if (window.open && (border.x == 0 || border.x == kDigits)) {
        window = Window::everything();
        continue;
      }
      if (border.x == kDigits) {  // there are no more than wanted
        window = Window::below_all();
        break;
      }
      clusters = border_.all.clusters[border.x];
      window.narrow(border.x);
      left = border.y;
      if (clusters == 1 || window.shift == 0) break;
      window.split();
    }
    return take(chosen, count, window, left, clusters, nearest, score, keys);
  }

 private:
  __device__ void clear(Digits& digits) const {
    if (thread_ >= kDigits) return;
    digits.keys[thread_] = digits.clusters[thread_] = 0;
  }

  // border_.all: keys and clusters by digit, over the team. An exchange.
  template <class Score, class Keys>
  __device__ void add_digits(int count, const Window& window, const Score& score,
                             const Keys& keys) {
    Digits& own = border_.own[digits_turn_];
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float x = score(i);
      const uint32_t digit = x > -INFINITY ? window.digit_of(rank_of(x)) : kDigits;
      if (digit >= kDigits) continue;
      atomicAdd(&own.keys[digit], keys(i));
      atomicAdd(&own.clusters[digit], 1);
    }
    __syncthreads();
    const int digit = thread_ % kDigits;
    const uint2 words = make_uint2(own.keys[digit], own.clusters[digit]);
#pragma unroll 1
    for (int rank = thread_ / kDigits; rank < this->team_; rank += Team::kThreads / kDigits) {
      this->tell_digit(rank, digit, words.x, words.y);
    }
    digits_turn_ ^= 1;
    clear(border_.own[digits_turn_]);
    const bool adds = thread_ < kDigits;
    this->await_told(kDigits, adds);
    if (adds) {
      const uint2 sum = this->sums_told(digit);
      border_.all.keys[digit] = sum.x;
      border_.all.clusters[digit] = sum.y;
    }
    this->end_exchange();
    __syncthreads();
  }

  // `window`: the digit at the border, with so many clusters; `left`: keys for these.
  template <class Chosen, class Score, class Keys>
  __device__ Chosen take(Chosen chosen, int count, const Window& window, uint32_t left,
                         uint32_t clusters, bool nearest, const Score& score, const Keys& keys) {
    const uint32_t high = window.high, low = high - ((1u << window.shift) - 1);
    const auto is_tied = [&](float x) {
      return x > -INFINITY && rank_of(x) <= high && rank_of(x) >= low;
    };
    uint32_t before = 0;  // keys of those that are tied and come first
    if (clusters > 1) {
      Sums own, all;
#pragma unroll 1
      for (int i = 0; i < count; ++i) own.b += is_tied(score(i)) ? keys(i) : 0;
      before = this->sums_before(own, all).b;
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float x = score(i);
      bool is = x > -INFINITY && rank_of(x) > high;
      if (is_tied(x)) {
        const uint32_t size = keys(i);
        is = before < left && (!nearest || 2 * (left - before) > size);
        before += size;
      }
      chosen.set(i, is);
    }
    return chosen;
  }

  BorderShared& border_;
  int digits_turn_ = 0;
};

}  // namespace sqz::cuda
