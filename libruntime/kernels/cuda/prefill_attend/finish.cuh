// The end of a small-M item: the states of the two warpgroups become one, and those of the blocks
// that share a list become its result.
#pragma once

#include "libruntime/kernels/cuda/prefill_attend/merge.cuh"
#include "libruntime/kernels/cuda/prefill_attend/shares.cuh"
#include "libruntime/kernels/cuda/prefill_common/rows.cuh"
#include "libruntime/kernels/cuda/ptx/atom.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"
#include "libruntime/kernels/cuda/ptx/fence_proxy_async.cuh"
#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"
#include "libruntime/kernels/cuda/ptx/named_barrier.cuh"

namespace sqz::cuda::prefill {

// All consumers.
__device__ __forceinline__ void sync_consumers() {
  constexpr int kBarrier = 1;
  ptx::bar_sync(kBarrier, 32 * kConsumerWarps);
}

// Writes the result of the item's rows, or their partial state. Each warpgroup gives the other one
// half of its columns, through the memory of the queries, which it hands back afterwards. `own`:
// of rows r and r + 8, as `fault`.
template <class T, class Config>
__device__ __forceinline__ void join_warpgroups(SharedStorage<Config>& shared,
                                                const PrefillAttendParams& params,
                                                const WorkItem& item, int warpgroup,
                                                const float (&out)[Config::kDim / 2],
                                                const RowSum (&own)[2], const bool (&fault)[2]) {
  constexpr int kConsumers = 32 * kConsumerWarps;
  constexpr int kPieces = Config::kDim / 16;  // of eight columns, in a half
  static_assert(2 * kPieces * kConsumers * sizeof(float2) <= Config::kQueryBytes);
  const int thread = threadIdx.x - (kThreads - kConsumers), lane = threadIdx.x & 31;
  const int first_row = 16 * (threadIdx.x / 32 & 3) + (lane >> 2);
  // [half of the rows][piece][thread], each thread's from the one of the other warpgroup.
  float2* exchange = reinterpret_cast<float2*>(shared.queries);
  // A piece of the left half of columns, or of the right one.
  const auto piece = [&](bool left, int j, int half) {
    const int at = 4 * j + 2 * half, other = at + 4 * kPieces;
    return left ? make_float2(out[at], out[at + 1]) : make_float2(out[other], out[other + 1]);
  };
  sync_consumers();  // no product reads the queries any more
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      exchange[(half * kPieces + j) * kConsumers + (thread ^ 128)] = piece(warpgroup != 0, j, half);
    }
    if ((lane & 3) == 0) {
      shared.sums[warpgroup][first_row + 8 * half] = make_float2(own[half].shift, own[half].sum);
    }
  }
  sync_consumers();
  const int2 block = block_of(params.blocks, item.block);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half;
    const int64_t query = query_index(params.tiles, block, item.kv_head, params.shape.kv_heads,
                                      params.shape.group, 0, row);
    if (query < 0) continue;
    const float2 a = shared.sums[0][row], b = shared.sums[1][row];
    const float shift = fmaxf(a.x, b.x), base = shift == -INFINITY ? 0.0f : shift;
    const float weight_a = ptx::ex2_approx(a.x - base), weight_b = ptx::ex2_approx(b.x - base);
    RowEnd end = end_of({shift, weight_a * a.y + weight_b * b.y});
    if (fault[half]) end = {NAN, NAN};
    const float mine = (warpgroup == 0 ? weight_a : weight_b) * end.inverse;
    const float others = (warpgroup == 0 ? weight_b : weight_a) * end.inverse;
    const int column = 8 * kPieces * warpgroup + 2 * (lane & 3);
    const bool partial = item.slot >= 0;
    const int64_t at = partial ? static_cast<int64_t>(item.slot) * kSmallRows + row : query;
    if (warpgroup == 0 && (lane & 3) == 0) {
      (partial ? params.partial_lse[at] : params.lse[at]) = end.lse;
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const float2 x = piece(warpgroup == 0, j, half);
      const float2 y = exchange[(half * kPieces + j) * kConsumers + thread];
      const float2 sum = make_float2(mine * x.x + others * y.x, mine * x.y + others * y.y);
      const int64_t to = at * Config::kDim + column + 8 * j;
      if (partial) {
        *reinterpret_cast<float2*>(params.partial_out + to) = sum;
      } else {
        *reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + to) = pack_pair<T>(sum.x, sum.y);
      }
    }
  }
  ptx::fence_proxy_async_shared();
  ptx::mbarrier_arrive_warp(&shared.queries_empty);
}

// Says that the block's partial state of the item's list is there, and merges a share of the rows
// when all are. Blocks that go on with another list leave their share, and so does one that might
// wait for a block that has not begun; the last one to arrive takes what is left.
template <class T, class Config>
__device__ __forceinline__ void merge_list(SharedStorage<Config>& shared,
                                           const PrefillAttendParams& params,
                                           const WorkItem& item) {
  const Share share = Share::of(item.share);
  unsigned long long* arrivals =
      params.arrivals + item.block * params.shape.kv_heads + item.kv_head;
  const bool leads = threadIdx.x == kThreads - 32 * kConsumerWarps;
  bool stays = false;
  if (leads && share.last != 0) {
    const unsigned long long now = *static_cast<volatile unsigned long long*>(arrivals);
    stays = number_of(now, kStarted) == share.parts;
  }
  sync_consumers();  // the state is written
  if (leads) {
    const unsigned long long before =
        ptx::atom_add_acq_rel(arrivals, kArrived + (stays ? kMerging : kLeft));
    const bool last = number_of(before, kArrived) + 1 == share.parts;
    const uint32_t first = number_of(before, kMerging);
    shared.merged[0] = first;
    shared.merged[1] = last ? share.merging : stays ? first + 1 : first;
    while (stays && !last && number_of(ptx::ld_acquire(arrivals), kArrived) < share.parts) {
    }
    if (!stays && number_of(before, kLeft) + 1 == share.parts) *arrivals = 0;
  }
  sync_consumers();
  // Whoever is the last to look at the numbers clears them for the next call.
  const bool clears =
      leads && stays && number_of(atomicAdd(arrivals, kLeft), kLeft) + 1 == share.parts;
  const int2 block = block_of(params.blocks, item.block);
  constexpr int kPieces = (Config::kDim + kMergeColumns - 1) / kMergeColumns;  // of a row
  constexpr int kBatch = 24;
  const uint32_t pieces = block.y * params.shape.group * kPieces;
  const uint32_t begin = pieces * shared.merged[0] / share.merging;
  const uint32_t end = pieces * shared.merged[1] / share.merging;
  for (uint32_t i = begin + threadIdx.x / 32 % kConsumerWarps; i < end; i += kConsumerWarps) {
    const int row = static_cast<int>(i / kPieces);
    const int64_t query = query_index(params.tiles, block, item.kv_head, params.shape.kv_heads,
                                      params.shape.group, 0, row);
    merge_row<T, kSmallRows, kBatch>(params, item.slot - static_cast<int>(share.part),
                                     static_cast<int>(share.parts), row,
                                     static_cast<int>(i % kPieces) * kMergeColumns, query);
  }
  if (clears) *arrivals = 0;
}

}  // namespace sqz::cuda::prefill
