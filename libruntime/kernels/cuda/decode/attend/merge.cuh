// The end of a segment: the states of its warps into one, the splits of its pair into the result.
// The block that finishes last merges them in the order of the keys: the same bits whatever the
// timing.
#pragma once

#include "libruntime/kernels/cuda/decode/attend/work_split.cuh"
#include "libruntime/kernels/cuda/decode/context_layer.h"
#include "libruntime/kernels/cuda/ptx/atom.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda {

template <int kDim, int kRows, bool kCoded, bool kOwn>
class AttendMerge : protected AttendWorkSplit<kDim, kRows, kOwn> {
 protected:
  using Base = AttendWorkSplit<kDim, kRows, kOwn>;
  using Partial = typename Base::Partial;
  using Segment = typename Base::Segment;
  using Base::Base;
  using Base::lane_;
  using Base::p_;
  using Base::s_;
  using Base::thread_;
  using Base::warp_;

  static constexpr int kHalves = (kDim + 63) / 64;  // of a value row: 64 dimensions each
  static constexpr int kTilesOut = kHalves * 8;     // of 8 dimensions
  // Column n has eight dimensions of half h, from first_dim() on. A lane loads 16 bytes at once:
  // these of a row of 16 bits, and those of two halves of a row of 8 bits, which are neighbours.
  static constexpr bool kPairs = kCoded && kHalves % 2 == 0;
  __device__ static constexpr int first_dim(int h, int n) {
    return kPairs ? 128 * (h / 2) + 16 * n + 8 * (h % 2) : 64 * h + 8 * n;
  }

  static constexpr int kParts = kRows / 8;  // of the rows: a lane has one of each
  // The part of a result d[j] of an mma. Up to 8 rows are added up from two of its rows.
  __device__ static constexpr int part_of(int j) { return j / 2 % kParts; }

  // A lane's numbers of a tile: those of an mma, or, for rows of 8 bits, its results.
  static constexpr int kOut = kCoded ? 2 * kParts : 4;

  // A lane of the warp has query rows lane / 4 + 8 part.
  struct State {
    float maximum[kParts], sum[kParts];  // sum over this lane's keys
    float out[kTilesOut][kOut];          // tile 8 h + j, column n: dimension first_dim(h, n) + j
  };

  // Returns the result of row lane / 4 + 8 part and column 2 (lane % 4) + i of a tile in State.
  __device__ static float result_of(const float (&out)[kOut], int part, int i) {
    if constexpr (kOut == 2) {
      return out[i];
    } else {
      return product_of<kRows>(out, part, i);
    }
  }

  __device__ void finish_segment(const Segment& segment, State& state) {
    merge_sums(state);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      merge_warps(part, state);
      if (segment.splits > 1) {
        leave_split(segment, part);
      } else {
        write_own(segment, part);
      }
      __syncthreads();
    }
    if (segment.splits > 1 && is_last(segment)) merge_splits(segment);
    __syncthreads();
  }

  // Writes the results of pairs that do not count: no block has a part of them.
  __device__ void write_others() const {
    const auto first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
#pragma unroll 1
    for (int pair = first; pair < this->pairs_; pair += step) {
      if (this->counts(pair)) continue;
      const int64_t to = row_of(pair, 0);
#pragma unroll 1
      for (int i = thread_; i < p_.group * kDim / 2; i += kAttendThreads) {
        store_2(p_.q_dtype, 0, 0, p_.out, to * kDim + 2 * i);
      }
      if (thread_ < p_.group) p_.lse[to + thread_] = -INFINITY;
    }
  }

 private:
  static constexpr int kQuads = kDim / 4;  // of four neighbouring dimensions of a row

  // Rows of a part.
  __device__ int rows_of(int part) const {
    return min(p_.group - 8 * part, 8);
  }

  // Quad q of a row of s_.values; swizzled, for the lanes of merge_warps() to fall on all banks.
  __device__ float4& quad(int warp, int row, int q) const {
    const int place = q ^ (row % 2 + q / 8 % 4 * 2);
    return *reinterpret_cast<float4*>(&s_.values[warp][row][4 * place]);
  }

  // The warps' maxima and sums to s_.sums.
  __device__ void merge_sums(State& state) {
    // A value beyond float32 makes the sum NaN.
    float zeros[4] = {};
#pragma unroll
    for (int i = 0; i < kOut * kTilesOut; ++i) zeros[i % kOut] += 0 * state.out[i / kOut][i % kOut];
#pragma unroll
    for (int i = 0; i < kOut; ++i) state.sum[part_of(i)] += zeros[i];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) {
        state.sum[part] += __shfl_xor_sync(~0u, state.sum[part], step);
      }
      if (lane_ % 4 == 0) {
        s_.sums[lane_ / 4 + 8 * part][warp_] = make_float2(state.maximum[part], state.sum[part]);
      }
    }
    __syncthreads();  // the list has been read, too
  }

  // The warps' states of a part's rows to s_.values, relative to one maximum.
  __device__ __forceinline__ void merge_warps(int part, const State& state) {
    const int row = lane_ / 4;
    float top = kLowestMaximum, sum = 0;
    float2 sums[kAttendWarps];
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      sums[w] = s_.sums[row + 8 * part][w];
      top = fmaxf(top, sums[w].x);
    }
    top += 3;  // so that eight values can be added up
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) sum += sums[w].y * ptx::ex2_approx(sums[w].x - top);
    if (warp_ == 0 && lane_ % 4 == 0) s_.total[row + 8 * part] = make_float2(top, sum);
    const float factor = ptx::ex2_approx(state.maximum[part] - top);
#pragma unroll
    for (int i = 0; i < kTilesOut; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int dim = first_dim(i / 8, 2 * (lane_ % 4) + j) + i % 8;
        const auto value = [&](int tile) { return result_of(state.out[tile], part, j) * factor; };
        if (row < rows_of(part) && dim < kDim) {
          quad(warp_, row, dim / 4) =
              make_float4(value(i), value(i + 1), value(i + 2), value(i + 3));
        }
      }
    }
    __syncthreads();
  }

  __device__ float4 merged(int row, int q) const {
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      const float4 own = quad(w, row, q);
      sum.x += own.x;
      sum.y += own.y;
      sum.z += own.z;
      sum.w += own.w;
    }
    return sum;
  }

  // Leaves a part of the rows to whichever block merges the pair.
  __device__ void leave_split(const Segment& segment, int part) const {
    Partial* own = segment.own;
#pragma unroll 1
    for (int i = thread_; i < rows_of(part) * kQuads; i += kAttendThreads) {
      *reinterpret_cast<float4*>(&own->values[8 * part + i / kQuads][i % kQuads * 4]) =
          merged(i / kQuads, i % kQuads);
    }
    if (thread_ < rows_of(part)) own->total[8 * part + thread_] = s_.total[8 * part + thread_];
  }

  // Whether all other blocks of the pair have left theirs before: it is to be merged here.
  __device__ bool is_last(const Segment& segment) {
    if (thread_ == 0) {
      auto* arrived = static_cast<uint32_t*>(p_.workspace) + segment.pair;
      const uint32_t before = ptx::atom_add_acq_rel(arrived, 1);
      s_.last = before == static_cast<uint32_t>(segment.splits) - 1 ? 1 : 0;
      if (s_.last != 0) *arrived = 0;  // for the next launch
    }
    __syncthreads();
    return s_.last != 0;
  }

  // A warp takes 64 dimensions of a row, two neighbours a lane, and adds them up over the splits,
  // kBatch of them under way. Lane i weighs splits i, 32 + i, ...
  __device__ void merge_splits(const Segment& segment) const {
    constexpr int kBatch = 16;
    static_assert(32 % kBatch == 0);
#pragma unroll 1
    for (int item = warp_; item < p_.group * kHalves; item += kAttendWarps) {
      const int row = item / kHalves, dim = item % kHalves * 64 + 2 * lane_;
      float2 values[kBatch], own = total_of(segment, lane_, row), sum = {};
      load_splits(segment, 0, row, dim, values);
      float top = own.x, total = 0;
#pragma unroll 1
      for (int i = lane_ + 32; i < segment.splits; i += 32) {
        top = fmaxf(top, total_of(segment, i, row).x);
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      top += 8;  // so that the values of 256 blocks can be added up
      float weight = 0;
#pragma unroll 1
      for (int first = 0; first < segment.splits; first += kBatch) {
        if (first > 0) load_splits(segment, first, row, dim, values);
        if (first % 32 == 0) {
          if (first > 0) own = total_of(segment, first + lane_, row);
          weight = ptx::ex2_approx(own.x - top);
          total += own.y * weight;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const float of_split = __shfl_sync(~0u, weight, (first + i) % 32);
          if (first + i >= segment.splits) continue;
          sum.x += values[i].x * of_split;
          sum.y += values[i].y * of_split;
        }
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      const bool fault = segment.totals.fault != 0;
      const int64_t to = row_of(segment.pair, row);
      if (dim < kDim) {
        const float inverse = inverse_of(total, fault);
        store_2(p_.q_dtype, sum.x * inverse, sum.y * inverse, p_.out, to * kDim + dim);
      }
      if (item % kHalves == 0 && lane_ == 0) p_.lse[to] = lse_of(make_float2(top, total), fault);
    }
  }

  // Maximum and sum of a split; of none beyond the last.
  __device__ static float2 total_of(const Segment& segment, int split, int row) {
    if (split >= segment.splits) return make_float2(kLowestMaximum, 0);
    return __ldcg(&segment.split(split)->total[row]);
  }

  template <int kBatch>
  __device__ static void load_splits(const Segment& segment, int first, int row, int dim,
                                     float2 (&values)[kBatch]) {
    if (dim >= kDim) return;
    const Partial* splits = segment.second + 2 * (first - 1);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= segment.splits) continue;
      const Partial* split = i == 0 && first == 0 ? segment.first : splits + 2 * i;
      values[i] = __ldcg(reinterpret_cast<const float2*>(&split->values[row][dim]));
    }
  }

  // The result of a pair that is this block's alone.
  __device__ void write_own(const Segment& segment, int part) const {
    const bool fault = segment.totals.fault != 0;
#pragma unroll 1
    for (int i = thread_; i < rows_of(part) * kQuads; i += kAttendThreads) {
      const int row = 8 * part + i / kQuads;
      const float inverse = inverse_of(s_.total[row].y, fault);
      const float4 sum = merged(i / kQuads, i % kQuads);
      const int64_t at = row_of(segment.pair, row) * kDim + i % kQuads * 4;
      store_2(p_.q_dtype, sum.x * inverse, sum.y * inverse, p_.out, at);
      store_2(p_.q_dtype, sum.z * inverse, sum.w * inverse, p_.out, at + 2);
    }
    if (thread_ >= rows_of(part)) return;
    const int row = 8 * part + thread_;
    p_.lse[row_of(segment.pair, row)] = lse_of(s_.total[row], fault);
  }

  __device__ int64_t row_of(int pair, int row) const {
    int64_t at = pair;
    if constexpr (kOwn) {
      at = int64_t{p_.own[pair / p_.kv_heads].row} * p_.kv_heads + pair % p_.kv_heads;
    }
    return at * p_.group + row;
  }
  __device__ static float inverse_of(float sum, bool fault) {
    return fault ? NAN : sum == 0 ? 0 : __fdividef(1.0f, sum);
  }
  __device__ static float lse_of(float2 total, bool fault) {
    const float lse = (total.x + log2f(total.y)) * 0.6931471805599453f;
    return fault ? NAN : total.y == 0 ? -INFINITY : lse;
  }
};

}  // namespace sqz::cuda
