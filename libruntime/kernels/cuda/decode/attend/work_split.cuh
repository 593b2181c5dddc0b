// Which keys a block attends to. Two ways to share the keys of all pairs evenly: every pair has
// blocks of its own, or, laid end to end, block b has keys [b W, (b + 1) W) and may serve the end
// of one pair and the beginning of the next. The start of a pair counts as kSwitchKeys keys there.
#pragma once

#include "libruntime/kernels/cuda/common/scores.cuh"
#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/decode/attend/shared.cuh"

namespace sqz::cuda {

template <int kDim, int kRows, bool kOwn>
class AttendWorkSplit {
 protected:
  using Partial = AttendPartial<kDim, kRows>;

  __device__ AttendWorkSplit(const AttendParams& params, AttendShared<kDim, kRows>& shared)
      : p_(params),
        s_(shared),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        pairs_(params.requests * params.kv_heads),
        exact_(params.exact - params.exact_skipped),
        listed_(params.lists.totals != nullptr) {}

  // What a block has of a pair, and where the splits of the pair are: the first by itself, the
  // others from the second on, two partials apart.
  struct Segment {
    int pair;
    RunTotals totals;
    int64_t begin, end;  // keys; none, if the pair has none
    int splits;
    Partial *own, *first, *second;

    __device__ const Partial* split(int i) const { return i == 0 ? first : second + 2 * (i - 1); }
  };

  // A pair without keys counts as one, so that some block writes its result; see count_keys(), too.
  __device__ int64_t keys_of(const RunTotals& totals) const {
    if (kOwn) return totals.exact + totals.keys;
    return exact_ + (listed_ ? totals.keys : p_.slots);
  }
  __device__ RunTotals totals_of(int pair) const {
    if (!listed_) return {};
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(p_.lists.totals + list_of(pair)));
    return {words.x, words.y, words.z, words.w};
  }
  __device__ int list_of(int pair) const { return p_.lists.of_heads ? pair % p_.kv_heads : pair; }

  // A block that serves two pairs pays for another start and end: so many keys could be read then.
  static constexpr uint32_t kSwitchKeys = 320;

  // ---- Pairs with blocks of their own.

  // If giving every pair blocks of its own makes no block longer than a switch costs, do so. Each
  // warp finds out by itself, lane i for pair i. False: split_evenly() it is. `any`: this block has
  // a segment.
  __device__ bool split_by_pairs(Segment& segment, bool& any) const {
    constexpr uint32_t kMostKeys = 1u << 26;  // of a pair: sums stay in 32 bits
    if (pairs_ > 32) return false;
    const uint32_t blocks = gridDim.x;
    const RunTotals totals = lane_ < pairs_ ? totals_of(lane_) : RunTotals{};
    const int64_t all_keys = lane_ < pairs_ ? max(int64_t{1}, keys_of(totals)) : 0;
    if (__any_sync(~0u, all_keys > kMostKeys)) return false;
    const auto keys = static_cast<uint32_t>(all_keys);
    const uint32_t total = __reduce_add_sync(~0u, keys);
    const uint32_t share =
        max(static_cast<uint32_t>(kLeastKeys), round_up((total + blocks - 1) / blocks));
    // Lane i tries `share` and i / 31 of what it may be longer.
    const uint32_t tried = round_up(share + kSwitchKeys * lane_ / 31);
    const float inverse = __fdividef(1.0f, static_cast<float>(tried));
    uint32_t needed = 0;
#pragma unroll 1
    for (int first = 0; first < pairs_; first += 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        needed += blocks_of(__shfl_sync(~0u, keys, first + i), tried, inverse);
      }
    }
    const uint32_t fits = __ballot_sync(~0u, needed <= blocks);
    if (fits == 0) return false;
    const int best = __ffs(fits) - 1;
    const uint32_t own =
        blocks_of(keys, __shfl_sync(~0u, tried, best), __shfl_sync(~0u, inverse, best));
    const uint32_t end = scan_warp(own);
    const uint32_t serves = __ballot_sync(~0u, end - own <= blockIdx.x && blockIdx.x < end);
    any = serves != 0;
    if (!any) return true;
    const int pair = __ffs(serves) - 1;
    const uint32_t splits = __shfl_sync(~0u, own, pair);
    const uint32_t first_block = __shfl_sync(~0u, end, pair) - splits;
    const uint32_t pair_keys = __shfl_sync(~0u, keys, pair);
    segment.totals.runs = __shfl_sync(~0u, totals.runs, pair);
    segment.totals.exact = __shfl_sync(~0u, totals.exact, pair);
    segment.totals.keys = __shfl_sync(~0u, totals.keys, pair);
    segment.totals.fault = __shfl_sync(~0u, totals.fault, pair);
    // Evenly, not the last one short.
    const uint32_t each = round_up((pair_keys + splits - 1) / splits);
    const auto present = static_cast<uint32_t>(keys_of(segment.totals));
    segment.pair = pair;
    segment.begin = min((blockIdx.x - first_block) * each, present);
    segment.end = min((blockIdx.x - first_block + 1) * each, present);
    segment.splits = static_cast<int>(splits);
    segment.own = partial(blockIdx.x, 0);
    segment.first = partial(first_block, 0);
    segment.second = partial(first_block + 1, 0);
    return true;
  }

  // ceil(keys / each), some hundreds at most, by 1 / each: the quotient is off by one at most.
  __device__ static uint32_t blocks_of(uint32_t keys, uint32_t each, float inverse) {
    const auto near = static_cast<uint32_t>(static_cast<float>(keys) * inverse);
    const auto left = static_cast<int32_t>(keys - near * each), step = static_cast<int32_t>(each);
    return near + (left > 0 ? 1 : 0) + (left > step ? 1 : 0) - (left <= -step ? 1 : 0);
  }

  // ---- Keys laid end to end.

  // The first pair of this block and the ends of its part: it has none if they are the same.
  __device__ int split_evenly(int64_t& at, int64_t& end) {
    count_keys();
    const int64_t total = s_.before[pairs_];
    const auto blocks = static_cast<int64_t>(gridDim.x);
    keys_a_block_ = max(kLeastKeys, round_up((total + blocks - 1) / blocks));
    at = blockIdx.x * keys_a_block_;
    end = min(at + keys_a_block_, total);
    int pair = 0;
#pragma unroll 1
    for (int step = kMostPairs; step > 0; step /= 2) {
      if (pair + step < pairs_ && s_.before[pair + step] <= at) pair += step;
    }
    at = min(max(at, first_key(pair)), end);
    return pair;
  }
  __device__ int64_t first_key(int pair) const {
    return s_.before[pair] + kSwitchKeys;
  }

  __device__ bool counts(int pair) const {
    return s_.before[pair + 1] > s_.before[pair];
  }

  // Makes a segment of this block's keys, from `at` on, of the first pair that counts, from `pair`
  // on. Passes that pair, and returns where the next one's keys begin, or the end.
  __device__ int64_t segment_of(int& pair, int64_t at, int64_t end, Segment& segment) {
    while (!counts(pair)) ++pair;
    const int64_t first = first_key(pair), last = s_.before[pair + 1];
    const int64_t first_block = first / keys_a_block_, last_block = (last - 1) / keys_a_block_;
    const RunTotals totals = totals_of(pair);
    segment = {.pair = pair,
               .totals = totals,
               .begin = at - first,
               .end = min(min(last, end) - first, keys_of(totals)),
               .splits = static_cast<int>(last_block - first_block) + 1,
               .own = partial(blockIdx.x, first > blockIdx.x * keys_a_block_ ? 1 : 0),
               .first = partial(first_block, first > first_block * keys_a_block_ ? 1 : 0),
               .second = partial(first_block + 1, 0)};
    return min(first_key(++pair), end);
  }

  // Fills s_.before, in which the start of each pair counts, too. Of requests with layers of their
  // own many may have no keys: they do not count.
  __device__ void count_keys() {
    __shared__ int64_t warp_sums[kAttendWarps];
    int64_t before = 0;
#pragma unroll 1
    for (int tile = 0; tile < pairs_; tile += kAttendThreads) {
      const int pair = tile + thread_;
      int64_t own = 0;
      if (pair < pairs_) {
        const RunTotals totals = totals_of(pair);
        own = max(int64_t{kOwn && totals.fault == 0 ? 0 : 1}, keys_of(totals));
        own += own > 0 ? kSwitchKeys : 0;
      }
      int64_t scan = scan_warp(own);
      if (lane_ == 31) warp_sums[warp_] = scan;
      __syncthreads();
      int64_t all = 0;
      for (int w = 0; w < kAttendWarps; ++w) {
        if (w < warp_) scan += warp_sums[w];
        all += warp_sums[w];
      }
      if (pair < pairs_) s_.before[pair] = before + scan - own;
      before += all;
      __syncthreads();
    }
    if (thread_ == 0) s_.before[pairs_] = before;
    __syncthreads();
  }

  template <class Keys>
  __device__ static Keys round_up(Keys keys) {
    return (keys + kTileKeys - 1) / kTileKeys * kTileKeys;
  }

  __device__ Partial* partial(int64_t block, int which) const {
    auto* partials = reinterpret_cast<Partial*>(static_cast<char*>(p_.workspace) +
                                                kMostPairs * sizeof(uint32_t));
    return partials + 2 * block + which;
  }

  const AttendParams& p_;
  AttendShared<kDim, kRows>& s_;
  const int thread_, lane_, warp_, pairs_;
  const int64_t exact_;  // exact keys that are attended; 0 if requests have layers of their own
  const bool listed_;

 private:
  int64_t keys_a_block_ = 1;  // of a block's part, laid end to end
};

}  // namespace sqz::cuda
