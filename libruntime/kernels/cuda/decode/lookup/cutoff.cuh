// Rules that count: the best clusters until a number of keys, or of pages, is reached. The cutoff
// is the k-th threshold: the score of the last that is chosen. A radix select finds it.
#pragma once

#include "libruntime/kernels/cuda/decode/lookup/push_team.cuh"

namespace sqz::cuda {

// {the bin at which the sum of sizes passes `left`, or kRadixBins; what is left before it}, best
// bin first. Every lane of a warp, 8 bins each.
__device__ inline uint2 find_cutoff(const uint32_t (&sizes)[kRadixBins], int lane, uint32_t left) {
  const auto* words = reinterpret_cast<const uint4*>(sizes) + 2 * lane;
  const uint4 a = words[0], b = words[1];
  // Sums up to and with each bin.
  const uint32_t upto[8] = {a.x,
                            a.x + a.y,
                            a.x + a.y + a.z,
                            a.x + a.y + a.z + a.w,
                            a.x + a.y + a.z + a.w + b.x,
                            a.x + a.y + a.z + a.w + (b.x + b.y),
                            a.x + a.y + a.z + a.w + (b.x + b.y + b.z),
                            a.x + a.y + a.z + a.w + (b.x + b.y + b.z + b.w)};
  const uint32_t scan = scan_warp(upto[7]);
  const unsigned passes = __ballot_sync(~0u, scan > left);
  const int cutoff = passes == 0 ? 31 : __ffs(static_cast<int>(passes)) - 1;
  const uint32_t before = scan - upto[7];
  uint32_t bin = 8 * lane, fitting = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool fits = before + upto[i] <= left;
    bin += fits ? 1 : 0;
    fitting = max(fitting, fits ? upto[i] : 0);
  }
  return make_uint2(__shfl_sync(~0u, bin, cutoff),
                    left - __shfl_sync(~0u, before + fitting, cutoff));
}

struct RadixBins {
  alignas(16) uint32_t keys[kRadixBins];
  uint32_t clusters[kRadixBins];
};

// In shared memory; behind it what a team keeps there of its members' bins.
struct CutoffShared {
  RadixBins own[2];  // of this block, in turn; the one that comes next is zero
  RadixBins all;     // of the team
};
constexpr int64_t cutoff_bytes(int team) {
  return static_cast<int64_t>(sizeof(CutoffShared)) + PushTeam::bin_bytes(team);
}

// The chosen ones of a thread's clusters: a bit for each of up to 32.
struct ChosenBits {
  uint32_t bits = 0;

  __device__ void set(uint32_t i, bool is) { bits |= is ? 1u << i : 0; }
  __device__ bool has(uint32_t i) const { return (bits >> i & 1) != 0; }
  // body(i) for all of them.
  template <class Body>
  __device__ void for_each(const Body& body) const {
#pragma unroll 1
    for (uint32_t left = bits; left != 0; left &= left - 1) body(__ffs(left) - 1);
  }
};

// Finds the cutoff, radix digit by digit, from histograms of keys over the whole team. The first
// 256 bins lie around the score that is expected: mostly one of them holds the cutoff, and among
// the 256 bins of that one the cluster at the cutoff is alone.
class CutoffSearch : protected PushTeam {
 public:
  // `cutoff`: cutoff_bytes() of shared memory, for best().
  __device__ CutoffSearch(int team, Shared& shared, char* cutoff)
      : PushTeam(team, shared, reinterpret_cast<uint2*>(cutoff + sizeof(CutoffShared))),
        cutoff_(*reinterpret_cast<CutoffShared*>(cutoff)) {}

 protected:
  static_assert(kThreads % kRadixBins == 0);

  // Before the first best(), a barrier between.
  __device__ void clear_bins() { clear(cutoff_.own[0]); }

  // Ranks [high - 256 2^shift + 1, high], of which bin 0 has the greatest; of one bin, when
  // narrow() has been called.
  struct Window {
    uint32_t high;
    int shift;
    bool open;  // greater ranks count as bin 0

    // 1/16 a bin for scores of -16 to -8 (log2), twice that below, half above.
    __device__ static Window around(float score) {
      const uint32_t rank = rank_of(score), half = kRadixBins / 2 << 16;
      return {rank > ~half ? ~0u : rank + half, 16, true};
    }
    __device__ static Window everything() { return {~0u, 24, false}; }
    __device__ static Window below_all() { return {0, 0, false}; }
    __device__ void narrow(uint32_t bin) { high -= bin << shift; }
    __device__ void split() {
      shift -= 8;
      open = false;
    }
    // kRadixBins or more: not in it.
    __device__ uint32_t bin_of(uint32_t rank) const {
      if (rank > high) return open ? 0 : kRadixBins;
      return high - rank >> shift;
    }
  };

  // The ones of this thread's clusters that are among the best: until `wanted` keys are
  // passed, or, if `nearest`, with or without the last cluster, whichever is nearer. score(i) and
  // keys(i) of the i-th of `count`; those of score -infinity are not there. Equal scores go by
  // their place. `window`: where the cutoff is looked for first.
  template <class Score, class Keys>
  __device__ ChosenBits best(int count, uint32_t wanted, bool nearest, Window window,
                             const Score& score, const Keys& keys) {
    uint32_t left = wanted, clusters = 0;
#pragma unroll 1
    for (;;) {
      add_bins(count, window, score, keys);
      const uint2 cutoff = find_cutoff(cutoff_.all.keys, this->lane_, left);
      if (window.open && (cutoff.x == 0 || cutoff.x == kRadixBins)) {
        window = Window::everything();
        continue;
      }
      if (cutoff.x == kRadixBins) {  // there are no more than wanted
        window = Window::below_all();
        break;
      }
      clusters = cutoff_.all.clusters[cutoff.x];
      window.narrow(cutoff.x);
      left = cutoff.y;
      if (clusters == 1 || window.shift == 0) break;
      window.split();
    }
    return take(count, window, left, clusters, nearest, score, keys);
  }

 private:
  __device__ void clear(RadixBins& bins) const {
    if (thread_ >= kRadixBins) return;
    bins.keys[thread_] = bins.clusters[thread_] = 0;
  }

  // cutoff_.all: keys and clusters by bin, over the team. An exchange.
  template <class Score, class Keys>
  __device__ void add_bins(int count, const Window& window, const Score& score, const Keys& keys) {
    RadixBins& own = cutoff_.own[bins_turn_];
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float x = score(i);
      const uint32_t bin = x > -INFINITY ? window.bin_of(rank_of(x)) : kRadixBins;
      if (bin >= kRadixBins) continue;
      atomicAdd(&own.keys[bin], keys(i));
      atomicAdd(&own.clusters[bin], 1);
    }
    __syncthreads();
    const int bin = thread_ % kRadixBins;
    const uint2 words = make_uint2(own.keys[bin], own.clusters[bin]);
#pragma unroll 1
    for (int rank = thread_ / kRadixBins; rank < this->team_; rank += kThreads / kRadixBins) {
      this->send_bin(rank, bin, words.x, words.y);
    }
    bins_turn_ ^= 1;
    clear(cutoff_.own[bins_turn_]);
    const bool adds = thread_ < kRadixBins;
    this->await_received(kRadixBins, adds);
    if (adds) {
      const uint2 sum = this->received_sums(bin);
      cutoff_.all.keys[bin] = sum.x;
      cutoff_.all.clusters[bin] = sum.y;
    }
    this->end_exchange();
    __syncthreads();
  }

  // `window`: the bin at the cutoff, with so many clusters; `left`: keys for these.
  template <class Score, class Keys>
  __device__ ChosenBits take(int count, const Window& window, uint32_t left, uint32_t clusters,
                             bool nearest, const Score& score, const Keys& keys) {
    ChosenBits chosen;
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

  CutoffShared& cutoff_;
  int bins_turn_ = 0;
};

}  // namespace sqz::cuda
