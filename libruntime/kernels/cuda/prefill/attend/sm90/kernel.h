// The parts of prefill_attend(): schedule, attend, merge.
#pragma once

#include "libruntime/kernels/cuda/prefill/attend/merge.h"
#include "libruntime/kernels/cuda/prefill/attend/sm90/config.h"
#include "libruntime/kernels/cuda/prefill/common/tiles.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"

namespace sqz::cuda::prefill {

// Parameters of every kernel of an attend call.
struct PrefillAttendParams : PrefillAttend {
  QueryTiles tiles = {};
  int32_t exact = 0;                     // exact keys that are attended
  float scale = 0;                       // of the logits, times log2(e)
  int32_t tile_rows = 0, tile_keys = 0;  // query rows and keys of a tile of the attend kernel
  int32_t item_capacity = 0, slot_capacity = 0;
  WorkItem* items = nullptr;    // [item_capacity]
  SplitTile* splits = nullptr;  // [slot_capacity]
  WorkCounts* counts = nullptr;
  float* partial_out = nullptr;  // [slot_capacity, tile_rows, d] normalised
  float* partial_lse = nullptr;  // [slot_capacity, tile_rows] natural log
};

struct AttendMaps : LayerMaps {
  CUtensorMap queries;
};

// Tiles of all lists as items, longest first, in `multiprocessors` about equal shares.
Status launch_schedule(const PrefillAttendParams& params, int multiprocessors, cudaStream_t stream);

// T = __nv_bfloat16 or __half; d = 64, 96, 128 or 256, the last not for rows of 8 bits, whose tiles
// do not fit. Compute capability 9.0.
template <class T, int kDim>
Status launch_attend(const PrefillAttendParams& params, int multiprocessors, cudaStream_t stream);

// Keys of a tile of that kernel. Memory bounds calls of few rows: many small tiles are under way.
// With masks 176 keys do not fit in the registers, and rows of 8 bits take shared memory for codes.
constexpr int tile_keys(int dim, bool few_rows, bool masked, bool coded) {
  if (few_rows || coded) return 64;
  return dim == 256 ? (masked ? 64 : 80) : dim == 128 && !masked ? 176 : 128;
}

}  // namespace sqz::cuda::prefill
