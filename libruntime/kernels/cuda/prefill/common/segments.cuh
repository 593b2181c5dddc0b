// A list of keys as a tile of shared memory sees it: exact keys, then runs, then zeros without end.
// A warp keeps 32 consecutive segments of it, one a lane, and each lane fetches its part of a tile
// in boxes of powers of two rows.
#pragma once

#include <cuda.h>

#include "libruntime/kernels/cuda/common/run_search.cuh"
#include "libruntime/kernels/cuda/prefill/common/tiles.h"
#include "libruntime/kernels/cuda/ptx/cp_async_bulk.cuh"
#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"

namespace sqz::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;
inline constexpr int32_t kOutside = 0x7FFFFF00;  // a row that no tensor has: arrives as zeros

// One list, in registers of every thread.
struct KeyListView {
  const uint32_t* first;   // of each run; null: one run of `total`
  const uint32_t* before;  // keys in the runs before
  int32_t count;           // runs
  int32_t exact;           // keys before the runs
  int32_t exact_first;     // row of the first of them
  int32_t total;           // keys in runs

  static __device__ __forceinline__ KeyListView of(const RunLists& lists, int32_t list,
                                                   int32_t exact, int32_t exact_first,
                                                   int32_t all) {
    KeyListView view;
    view.exact = exact;
    view.exact_first = exact_first;
    if (lists.totals == nullptr) {
      view.first = nullptr;
      view.before = nullptr;
      view.count = all > 0 ? 1 : 0;
      view.total = all;
    } else {
      const int64_t begin = list * (lists.capacity + 1);
      view.first = lists.first + begin;
      view.before = lists.before + begin;
      view.count = static_cast<int32_t>(lists.totals[list].runs);
      view.total = static_cast<int32_t>(lists.totals[list].keys);
    }
    return view;
  }
};

// Keys [begin, end) of the list are rows from `source` on.
struct Segment {
  int32_t begin, end, source;
  bool exact;
};

class SegmentWindow {
 public:
  // The window that holds position `begin` of the list. All 32 lanes, as for all members.
  __device__ __forceinline__ SegmentWindow(const KeyListView& list, int32_t begin)
      : list_(list), base_(first_segment(begin)) {
    current_ = segment(base_ + lane());
  }

  // Leaves positions before `begin` out.
  __device__ __forceinline__ void skip_to(int32_t begin) {
    const auto reaches = [&] { return __shfl_sync(kAllLanes, current_.end, 31) > begin; };
    if (reaches()) return;
    base_ += 32;
    current_ = segment(base_ + lane());
    if (reaches()) return;
    base_ = first_segment(begin);
    current_ = segment(base_ + lane());
  }

  // f(segment, lo, hi) in the lane that holds positions [lo, hi) of [begin, end); ascending calls.
  template <class Function>
  __device__ __forceinline__ void for_each(int32_t begin, int32_t end, const Function& f) {
    while (true) {
      const int32_t lo = max(current_.begin, begin), hi = min(current_.end, end);
      f(current_, lo, hi);
      if (__shfl_sync(kAllLanes, current_.end, 31) >= end) return;
      base_ += 32;
      current_ = segment(base_ + lane());
    }
  }

 private:
  static __device__ __forceinline__ int32_t lane() { return threadIdx.x & 31; }

  // Segment 0 is the exact keys, 1 + r run r, then the zeros.
  __device__ __forceinline__ Segment segment(int32_t index) const {
    constexpr int32_t kEnd = 0x7FFFFFFF;
    if (index == 0) return {0, list_.exact, list_.exact_first, true};
    const int32_t run = index - 1;
    if (run < list_.count) {
      if (list_.first == nullptr) return {list_.exact, list_.exact + list_.total, 0, false};
      return {list_.exact + static_cast<int32_t>(list_.before[run]),
              list_.exact + static_cast<int32_t>(list_.before[run + 1]),
              static_cast<int32_t>(list_.first[run]), false};
    }
    if (run == list_.count) return {list_.exact + list_.total, kEnd, kOutside, false};
    return {kEnd, kEnd, kOutside, false};
  }

  __device__ __forceinline__ int32_t first_segment(int32_t begin) const {
    if (begin < list_.exact || list_.first == nullptr) return 0;
    return 1 + static_cast<int32_t>(run_of(list_.before, static_cast<uint32_t>(list_.count),
                                           static_cast<uint32_t>(begin - list_.exact)));
  }

  KeyListView list_;
  int32_t base_;
  Segment current_;
};

// Fetches chunks [first_chunk, end_chunk) of positions [begin, begin + kRows) of the list into a
// tile [chunk][kRows][kRowBytes].
template <int kRows>
__device__ __forceinline__ void fetch_tile(int first_chunk, int end_chunk, SegmentWindow& window,
                                           int32_t begin, int32_t head, const RowMaps& slots,
                                           const RowMaps& exact, uint8_t* tile, uint64_t* barrier,
                                           uint64_t policy) {
  window.for_each(begin, begin + kRows, [&](const Segment& segment, int32_t lo, int32_t hi) {
    const RowMaps& maps = segment.exact ? exact : slots;
    int32_t left = hi - lo;
    const bool outside = segment.source == kOutside;
    int32_t row = outside ? kOutside : segment.source + (lo - segment.begin);
    uint8_t* to = tile + (lo - begin) * kRowBytes;
    while (left > 0) {
      const int box = min(kBoxes - 1, 31 - __clz(left));
#pragma unroll
      for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
        ptx::cp_async_bulk_tensor_3d(to + chunk * kRows * kRowBytes, &maps.box[box],
                                     chunk * (kRowBytes / 2), row, head, barrier, policy);
      }
      left -= 1 << box;
      if (!outside) row += 1 << box;
      to += kRowBytes << box;
    }
  });
}

}  // namespace sqz::cuda
