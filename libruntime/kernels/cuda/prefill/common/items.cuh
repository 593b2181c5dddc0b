// Items of work that one thread of a block hands to all its other warps.
#pragma once

#include "libruntime/kernels/cuda/prefill/common/ring.cuh"
#include "libruntime/kernels/cuda/ptx/lane.cuh"
#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"

namespace sqz::cuda::prefill {

// Items in the order in which they are taken; every warp walks the same ones. `Storage`: the shared
// memory of a kernel, with items[2] and the barriers item_full[2] and item_empty[2].
template <class Storage>
class ItemReader {
 public:
  __device__ __forceinline__ explicit ItemReader(Storage& shared) : shared_(shared) {}

  // False at the end. All lanes of a warp.
  template <class Item>
  __device__ __forceinline__ bool next(Item& item) {
    ptx::mbarrier_wait_parity(&shared_.item_full[ring_.stage], ring_.parity);
    item = shared_.items[ring_.stage];
    auto* words = reinterpret_cast<int*>(&item);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Item) / sizeof(int)); ++i) {
      words[i] = ptx::uniform(words[i]);
    }
    ptx::mbarrier_arrive_warp(&shared_.item_empty[ring_.stage]);
    ring_.advance();
    return item.block >= 0;
  }

  // The place of the item that follows.
  __device__ __forceinline__ const RingPosition<2>& position() const {
    return ring_;
  }

 private:
  Storage& shared_;
  RingPosition<2> ring_;
};

}  // namespace sqz::cuda::prefill
