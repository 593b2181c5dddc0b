// The work of a small-M call, which has few lists and no schedule: the lists' tiles of keys, end to
// end, are cut into equal shares, one a block. A list that several blocks have is merged by them.
#pragma once

#include "libruntime/kernels/cuda/prefill_attend/kernel.h"
#include "libruntime/kernels/cuda/prefill_common/segments.cuh"

namespace sqz::cuda::prefill {

inline constexpr uint32_t kListCost = 3;    // in tiles of keys: to go on with a further list
inline constexpr uint32_t kLeastShare = 8;  // tiles: below, merging costs more than it gains

// params.arrivals: four numbers of blocks, in 16 bits each.
inline constexpr unsigned long long kStarted = 1;
inline constexpr unsigned long long kArrived = 1ull << 16;  // have left their partial states
inline constexpr unsigned long long kMerging = 1ull << 32;  // and merge a share of the rows
inline constexpr unsigned long long kLeft = 1ull << 48;     // do not look at the numbers any more
__device__ __forceinline__ uint32_t number_of(unsigned long long arrivals,
                                              unsigned long long what) {
  return static_cast<uint32_t>(arrivals / what) & 0xFFFF;
}

// Items of this block, those of a warp together. Little is kept from one to the next: registers of
// the fetching warps are few.
class ShareItems {
 public:
  __device__ __forceinline__ explicit ShareItems(const PrefillAttendParams& params)
      : params_(params), whole_(params.whole != nullptr && *params.whole != 0) {
    uint32_t all = 0;
    for (int list = lane(); list < lists(); list += 32) all += length_of(keys_of(list));
    all = __reduce_add_sync(kAllLanes, all);
    share_ = max(kLeastShare, (all + gridDim.x - 1) / gridDim.x);
  }

  // Nothing is asked for in advance.
  __device__ __forceinline__ void ask() {}

  // The next one; its block is -1 at the end.
  __device__ __forceinline__ WorkItem next() {
    const uint32_t begin = blockIdx.x * share_, end = begin + share_;
    for (; next_ < lists(); next_ += 32) {
      const int list = next_ + lane();
      const int32_t keys = list < lists() ? keys_of(list) : 0;
      const uint32_t length = length_of(keys);
      uint32_t list_end = length;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t before = __shfl_up_sync(kAllLanes, list_end, step);
        if (lane() >= step) list_end += before;
      }
      list_end += at_;
      // The list's own tiles come after its cost.
      const bool is = list < lists() && list_end - length + kListCost < end && list_end > begin;
      const unsigned found = __ballot_sync(kAllLanes, is);
      const int of = found == 0 ? 31 : __ffs(found) - 1;
      at_ = __shfl_sync(kAllLanes, list_end, of);
      if (found == 0) continue;
      next_ += of + 1;
      return item_of(next_ - 1, __shfl_sync(kAllLanes, keys, of), begin, end);
    }
    WorkItem item;
    item.block = -1;
    return item;
  }

 private:
  static __device__ __forceinline__ int lane() {
    return threadIdx.x & 31;
  }

  __device__ __forceinline__ int lists() const {
    return params_.serves[whole_ ? 1 : 0] ? params_.blocks.count * params_.shape.kv_heads : 0;
  }
  __device__ __forceinline__ int32_t keys_of(int list) const {
    const bool all = params_.selected.totals == nullptr || whole_;
    return params_.exact +
           (all ? params_.keys.slots : static_cast<int32_t>(params_.selected.totals[list].keys));
  }
  // Without keys a list has a tile, too: its result is written there.
  __device__ __forceinline__ uint32_t length_of(int32_t keys) const {
    const auto tile = static_cast<uint32_t>(params_.tile_keys);
    return kListCost + max(1u, (static_cast<uint32_t>(keys) + tile - 1) / tile);
  }

  // Of a list that ends at at_, what lies in tiles [begin, end).
  __device__ __forceinline__ WorkItem item_of(int list, int32_t keys, uint32_t begin,
                                              uint32_t end) const {
    const uint32_t first = at_ - length_of(keys) + kListCost;
    const uint32_t first_block = first / share_, last_block = (at_ - 1) / share_;
    // Whether a block whose tiles end at `share_end` goes on with the list after this one.
    const auto goes_on = [&](uint32_t share_end) {
      return list + 1 < lists() && at_ + kListCost < share_end;
    };
    WorkItem item;
    item.block = list / params_.shape.kv_heads;
    item.kv_head = list % params_.shape.kv_heads;
    item.tile = 0;
    item.begin = static_cast<int32_t>(max(first, begin) - first) * params_.tile_keys;
    item.end = min(static_cast<int32_t>(min(at_, end) - first) * params_.tile_keys, keys);
    item.whole = whole_ ? 1 : 0;
    const uint32_t parts = last_block - first_block + 1;
    item.share = Share{blockIdx.x - first_block, parts,
                       parts - (goes_on((last_block + 1) * share_) ? 1 : 0), goes_on(end) ? 0u : 1u}
                     .packed();
    // From an item to the next one the list grows, or the block, or both.
    item.slot = parts == 1 ? -1 : static_cast<int32_t>(blockIdx.x) + list;
    if (parts > 1 && lane() == 0) atomicAdd(&params_.arrivals[list], kStarted);
    return item;
  }

  const PrefillAttendParams& params_;
  const bool whole_;
  uint32_t share_;   // tiles of a block
  int next_ = 0;     // list that is looked at next,
  uint32_t at_ = 0;  // and where it begins
};

}  // namespace sqz::cuda::prefill
