// The parts of prefill_attend(): schedule, attend, merge.
#pragma once

#include "libruntime/kernels/cuda/prefill.h"
#include "libruntime/kernels/cuda/prefill_attend/config.h"
#include "libruntime/kernels/cuda/prefill_common/tiles.h"

namespace sqz::cuda::prefill {

// What every kernel of an attend call takes.
struct PrefillAttendParams {
  QueryBlocks blocks;
  QueryTiles tiles;
  RunLists selected;
  int32_t slots;          // M
  int32_t exact;          // exact keys that are attended
  int32_t exact_skipped;  // that lie before them
  int32_t dim, kv_heads, group;
  float scale;            // of the logits, times log2(e)
  void* out;              // [T, Hq, d]
  LseRows lse;            // of all rows
  const uint32_t* masks;  // [lists, mask_stride] or null
  int64_t mask_stride;
  bool narrow;  // a tile has at most kRows / 2 query rows, for both warpgroups: see kernel.cuh
  unsigned long long* counters;  // or null
  WorkItem* items;               // [item_capacity]
  SplitTile* splits;             // [slot_capacity]
  WorkCounts* counts;
  float* partial_out;  // [slot_capacity, kRows, d] normalised
  float* partial_lse;  // [slot_capacity, kRows] natural log
  int32_t item_capacity, slot_capacity;
  int32_t tile_keys;  // keys of a tile of the attend kernel
};

struct AttendMaps {
  CUtensorMap queries;
  RowMaps keys, values, exact_keys, exact_values;
};

// Where *whole is not 0, a call is `all`, and `lists` has no items; else the other way round. whole
// may be null.
struct AttendChoice {
  PrefillAttendParams lists, all;
  const uint32_t* whole;

  __device__ const PrefillAttendParams& params() const {
    return whole == nullptr || *whole == 0 ? lists : all;
  }
};

// Tiles of all lists as items, longest first, in `multiprocessors` about equal shares.
Status launch_schedule(const AttendChoice& choice, int multiprocessors, cudaStream_t stream);

// T = __nv_bfloat16 or __half; d = 64, 96, 128 or 256. Compute capability 9.0.
template <class T, int kDim>
Status launch_attend(const PrefillAttendParams& params, const PrefillAttend& call,
                     int multiprocessors, cudaStream_t stream);

// Keys of a tile of that kernel. Memory bounds narrow calls: many small tiles are under way. With
// masks 176 keys do not fit in the registers.
constexpr int tile_keys(int dim, bool narrow, bool masked) {
  if (narrow) return 64;
  return dim == 256 ? (masked ? 64 : 80) : dim == 128 && !masked ? 176 : 128;
}

// Partial states of split tiles into out and lse, in the order of their keys.
Status launch_merge(const AttendChoice& choice, DType dtype, int multiprocessors,
                    cudaStream_t stream);

}  // namespace sqz::cuda::prefill
