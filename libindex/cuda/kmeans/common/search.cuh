// The running arg-max of an assign kernel over the columns of its accumulator tiles.
//
// Tiles have the register layout of mma and wgmma: the four lanes of a quad share rows r and r + 8
// of a 16-row fragment and hold two adjacent columns of every eight. The state of a row lives in
// one lane of its quad: lane 2 s + h owns row r + 8 h of slot s (a warp works on up to two
// fragments, the slots).
//
// A tile costs one maximum a score, and no index: only if the tile's maximum comes within the
// margin of the row's best is the tile read again, to find the column and whether it is alone
// within the margin. So labels are known with the error of the products and nothing more.
#pragma once

#include "libindex/cuda/kmeans/common/assign.h"

namespace sqz::cuda {

struct RowSearch {
  float best, second, third;  // products, descending; third is a bound for all others
  uint32_t best_column, second_column;
  float margin;  // two products further apart than this are in the right order
};

__device__ __forceinline__ RowSearch start_row(float inverse_norm, int dim) {
  RowSearch row;
  const bool zero = inverse_norm == 0;
  row.best = zero ? INFINITY : -INFINITY;  // nothing is ever found for a zero point
  row.second = row.third = -INFINITY;
  row.best_column = row.second_column = 0;
  row.margin = zero ? 0.0f : kMarginPerDim * static_cast<float>(dim) / inverse_norm;
  return row;
}

// Columns from `valid` on can win no more.
template <int N>
__device__ __forceinline__ void mask_columns(float (&tile)[N / 2], int valid) {
  const int first = 2 * (threadIdx.x & 3);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * j + first + e >= valid) tile[4 * j + e] = tile[4 * j + 2 + e] = -INFINITY;
    }
  }
}

namespace search {

inline constexpr float kHitWeight = 1024;  // more than any column number within a tile

// Maximum over this lane's columns of row r + 8 h. As integers floats order like themselves as long
// as one is positive, and three of them are compared at once; if all are negative some negative one
// comes out, and finish_row() sends rows without a positive product to the exact search.
template <int N>
__device__ __forceinline__ float lane_maximum(const float (&tile)[N / 2], int h) {
  int even = __float_as_int(tile[2 * h]), odd = __float_as_int(tile[4 + 2 * h]);
  even = max(even, __float_as_int(tile[2 * h + 1]));
  odd = max(odd, __float_as_int(tile[4 + 2 * h + 1]));
#pragma unroll
  for (int j = 2; j < N / 8; ++j) {
    int& chain = j % 2 == 0 ? even : odd;
    chain = __vimax3_s32(chain, __float_as_int(tile[4 * j + 2 * h]),
                         __float_as_int(tile[4 * j + 2 * h + 1]));
  }
  return __int_as_float(max(even, odd));
}

// 1 for products above a threshold, 0 for others, by a saturated multiply-add: by a power of two so
// large that nothing lands in between.
struct Step {
  float scale, shift;
};

__device__ __forceinline__ float step_scale(float margin) {
  const uint32_t exponent = __float_as_uint(margin) & 0x7F800000u;
  return __uint_as_float(((127u + 40u + 127u) << 23) - exponent);
}

// Sum over this lane's columns above the threshold in row r + 8 h of kHitWeight + column.
template <int N>
__device__ __forceinline__ float lane_hits(const float (&tile)[N / 2], int h, Step step) {
  float sums[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float hit = __saturatef(fmaf(tile[4 * j + 2 * h + e], step.scale, step.shift));
      sums[e] = fmaf(hit, kHitWeight + static_cast<float>(8 * j + e), sums[e]);
    }
  }
  const float sum = sums[0] + sums[1];
  return sum > 0 ? sum + static_cast<float>(2 * (threadIdx.x & 3)) : 0.0f;
}

__device__ __forceinline__ void insert(RowSearch& row, float product, uint32_t column, bool alone) {
  const bool first = product > row.best, second = product > row.second;
  row.third = second ? row.second : fmaxf(row.third, product);
  row.second = first ? row.best : (second ? product : row.second);
  row.second_column = first ? row.best_column : (second ? column : row.second_column);
  row.best = first ? product : row.best;
  row.best_column = first ? column : row.best_column;
  if (!alone) {  // others as good as this one, of unknown column
    row.second = fmaxf(row.second, product);
    row.third = fmaxf(row.third, product);
  }
}

}  // namespace search

// Reduces values[slot][h] of a quad's lanes, each to the lane that owns the row; with one slot, to
// both lanes of that h.
template <int kSlots, class Combine>
__device__ __forceinline__ float reduce_to_owners(const float (&values)[kSlots][2],
                                                  const Combine& combine) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const bool second_slot = threadIdx.x & 2, upper = threadIdx.x & 1;
  float halves[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float mine = values[kSlots - 1][h], first = values[0][h];
    const float keep = second_slot ? mine : first, send = second_slot ? first : mine;
    halves[h] = combine(keep, __shfl_xor_sync(kAll, send, 2));
  }
  const float keep = upper ? halves[1] : halves[0], send = upper ? halves[0] : halves[1];
  return combine(keep, __shfl_xor_sync(kAll, send, 1));
}

// Takes tiles of a warp's fragments, those of slots kFirst to kFirst + kSlots - 1, whose first
// column is `column`, into account. All 32 lanes.
template <int N, int kFirst, int kSlots>
__device__ __forceinline__ void search_tiles(const float (&tiles)[kSlots][N / 2], uint32_t column,
                                             RowSearch& row) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  constexpr unsigned kQuads = 0x11111111u;  // the first lane of each
  float maxima[kSlots][2];
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int h = 0; h < 2; ++h) maxima[slot][h] = search::lane_maximum<N>(tiles[slot], h);
  }
  const float maximum = reduce_to_owners(maxima, [](float a, float b) { return fmaxf(a, b); });
  const bool owner = kSlots == 2 || ((threadIdx.x >> 1) & 1) == kFirst;
  const bool found = owner && maximum >= row.best - row.margin;
  const unsigned founds = __ballot_sync(kAll, found);
  if (founds == 0) return;

  const float scale = search::step_scale(row.margin);
  const float shift = -(maximum - row.margin) * scale;
  float hits[kSlots][2];
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int lane = (threadIdx.x & 28) + 2 * (kFirst + slot) + h;
      const search::Step step = {__shfl_sync(kAll, scale, lane), __shfl_sync(kAll, shift, lane)};
      hits[slot][h] = 0;
      if (founds & (kQuads << (2 * (kFirst + slot) + h))) {
        hits[slot][h] = search::lane_hits<N>(tiles[slot], h, step);
      }
    }
  }
  const float sum = reduce_to_owners(hits, [](float a, float b) { return a + b; });
  if (found) {
    search::insert(row, maximum, column + static_cast<uint32_t>(sum - search::kHitWeight),
                   sum < 2 * search::kHitWeight);
  }
}

// A rank that is on its way, and whose it is. Counting takes a while to answer: a kernel that goes
// on to other points notes the rank later.
struct PendingRank {
  uint32_t index = 0xFFFFFFFFu, rank = 0;

  __device__ __forceinline__ void note(const AssignParams& params) const {
    if (index != 0xFFFFFFFFu) params.ranks[index] = rank;
  }
};

// Writes the result of point `point` of head `head`: one thread a row.
__device__ __forceinline__ PendingRank finish_row(const AssignParams& params, const RowSearch& row,
                                                  int head, int point, float inverse_norm) {
  const uint32_t index =
      static_cast<uint32_t>(head) * params.points_per_head + static_cast<uint32_t>(point);
  const uint32_t last_cluster = static_cast<uint32_t>(params.clusters - 1);
  const uint32_t label = min(row.best_column, last_cluster);
  const float limit = row.best - row.margin;
  params.labels[index] = label;
  if (params.cosines) params.cosines[index] = inverse_norm == 0 ? 0.0f : row.best * inverse_norm;
  if (inverse_norm != 0 && (row.third >= limit || !(row.best > row.margin))) {
    const uint32_t last =
        static_cast<uint32_t>(params.heads) * static_cast<uint32_t>(params.points_per_head) - 1;
    params.doubtful[last - atomicAdd(&params.doubtful_counts[1], 1u)] = make_uint2(index, 0);
    return {};
  }
  if (inverse_norm != 0 && row.second >= limit) {
    params.doubtful[atomicAdd(&params.doubtful_counts[0], 1u)] =
        make_uint2(index, min(row.second_column, last_cluster));
    return {};
  }
  const int64_t cluster = static_cast<int64_t>(head) * params.clusters + label;
  return {index, atomicAdd(&params.sizes[cluster], 1u)};
}

}  // namespace sqz::cuda
