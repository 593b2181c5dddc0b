// The best buckets of a pair and their runs, chosen by one block that knows all scores.
#pragma once

#include "libruntime/kernels/cuda/decode_classify/shared.cuh"

namespace sqz::cuda {

// rank_of() the other way.
__device__ inline float score_of(uint32_t rank) {
  return __uint_as_float((rank & 0x80000000u) != 0 ? rank ^ 0x80000000u : ~rank);
}

// Best first until `wanted` keys are nearest, as the rule `budget`. Scores fall into 256 digits of
// equal width between the best, digit 0, and the worst; only the buckets of the digit at which the
// keys run out are compared with each other. Thread i has the buckets [4 i, 4 i + 4) of every
// kTile of them, from their scores to their runs.
template <int kDim>
class BucketChoice {
 public:
  static constexpr uint32_t kTile = 4 * kLookupThreads;

  // scores, spans: [C], rounded up to a multiple of 4, in shared memory; list: workspace there,
  // [C]. s.best, s.worst, s.tied and the histogram are {0, ~0, 0, 0}, since the last barrier or
  // before.
  __device__ BucketChoice(const LookupParams& params, int pair, ClassifyShared<kDim>& shared,
                          float* scores, const uint2* spans, uint4* list)
      : p_(params),
        s_(shared),
        scores_(scores),
        spans_(spans),
        list_(list),
        pair_(pair),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        end_(static_cast<uint32_t>(params.level[0].clusters)) {}

  // `best`, `worst`: of this thread's scores, those of -infinity aside.
  __device__ void run(float best, float worst, uint32_t wanted) {
    tell_range(best, worst);
    __syncthreads();
    find_scale();
    add_sizes();
    __syncthreads();
    const uint2 border = find_border(s_.rules.histogram, lane_, wanted);
#pragma unroll 1
    for (uint32_t tile = 0; tile < end_; tile += kTile) compare(tile + 4 * thread_, border.x);
    __syncthreads();
    if (s_.tied != 0) {
      drop_tied(border.y);
      __syncthreads();
    }
    write_runs();
  }

 private:
  // Four buckets of a thread; those behind the last have score -infinity.
  struct Buckets {
    float score[4];
    uint32_t first[4], size[4];
  };

  __device__ Buckets load(uint32_t j) const {
    Buckets out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out.score[i] = -INFINITY;
      out.first[i] = out.size[i] = 0;
    }
    if (j >= end_) return out;
    const float4 score = *reinterpret_cast<const float4*>(scores_ + j);
    out.score[0] = score.x, out.score[1] = score.y, out.score[2] = score.z, out.score[3] = score.w;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint4 two = *reinterpret_cast<const uint4*>(spans_ + j + i);
      out.first[i] = two.x, out.size[i] = two.y - two.x;
      out.first[i + 1] = two.z, out.size[i + 1] = two.w - two.z;
    }
    return out;
  }

  __device__ void tell_range(float best, float worst) {
    const uint32_t most = __reduce_max_sync(~0u, rank_of(best)),
                   least = __reduce_min_sync(~0u, rank_of(worst));
    if (lane_ == 0) {
      atomicMax(&s_.best, most);
      atomicMin(&s_.worst, least);
    }
  }

  __device__ void find_scale() {
    best_ = score_of(s_.best);
    const float range = best_ - score_of(s_.worst);
    scale_ = range > 0 ? __fdividef(256, range) : 0;
  }

  // Never higher for a higher score.
  __device__ uint32_t digit_of(float score) const {
    return min(static_cast<uint32_t>((best_ - score) * scale_), 255u);
  }

  __device__ void add_sizes() {
#pragma unroll 1
    for (uint32_t j = 4 * thread_; j < end_; j += kTile) {
      const Buckets own = load(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (own.score[i] > -INFINITY) {
          atomicAdd(&s_.rules.histogram[digit_of(own.score[i])], own.size[i]);
        }
      }
    }
  }

  // Lists those of the digit at the border, drops those behind it.
  __device__ void compare(uint32_t j, uint32_t border) {
    Buckets own = load(j);
    unsigned tied[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t digit = digit_of(own.score[i]);
      tied[i] = __ballot_sync(~0u, own.score[i] > -INFINITY && digit == border);
      if (digit > border) own.score[i] = -INFINITY;
    }
    if (j < end_) {
      *reinterpret_cast<float4*>(scores_ + j) =
          make_float4(own.score[0], own.score[1], own.score[2], own.score[3]);
    }
    if ((tied[0] | tied[1] | tied[2] | tied[3]) == 0) return;
    uint32_t at = 0;
    if (lane_ == 0) {
      at = atomicAdd(&s_.tied, static_cast<uint32_t>(__popc(tied[0]) + __popc(tied[1]) +
                                                     __popc(tied[2]) + __popc(tied[3])));
    }
    at = __shfl_sync(~0u, at, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((tied[i] >> lane_ & 1) != 0) {
        list_[at + __popc(tied[i] & ((1u << lane_) - 1))] =
            make_uint4(__float_as_uint(own.score[i]), j + i, own.size[i], 0);
      }
      at += __popc(tied[i]);
    }
  }

  // `left`: keys for the buckets of the list, which together have more, or all that are left.
  __device__ void drop_tied(uint32_t left) {
    const uint32_t count = s_.tied;
#pragma unroll 1
    for (uint32_t i = thread_; i < count; i += kLookupThreads) {
      const uint4 own = list_[i];
      uint32_t before = 0;
#pragma unroll 4
      for (uint32_t k = 0; k < count; ++k) {
        const uint4 other = list_[k];
        const float score = __uint_as_float(own.x), others = __uint_as_float(other.x);
        const bool better = others > score || (others == score && other.y < own.y);
        before += better ? other.z : 0;
      }
      const bool chosen = before < left && 2 * uint64_t{left - before} > own.z;
      if (!chosen) scores_[own.y] = -INFINITY;
    }
  }

  // ---- Runs; they end at the latest where the buckets of a warp's tile end.

  __device__ void write_runs() {
    Sums all;  // of the tiles before
    int turn = 0;
#pragma unroll 1
    for (uint32_t tile = 0; tile < end_; tile += kTile, turn ^= 1) {
      Buckets own = load(tile + 4 * thread_);
      uint32_t keys = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own.size[i] = own.score[i] > -INFINITY ? own.size[i] : 0;
        keys += own.size[i];
      }
      // The end of the lane before: a run goes on where its last slot is followed by the next.
      uint32_t end = own.size[3] > 0 ? own.first[3] + own.size[3] : ~0u;
      end = __shfl_up_sync(~0u, end, 1);
      end = lane_ == 0 ? ~0u : end;
      uint32_t runs_before = 0, runs = 0;
      bool begins[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        begins[i] = own.size[i] > 0 && own.first[i] != end;
        end = own.size[i] > 0 ? own.first[i] + own.size[i] : ~0u;
        const unsigned of_warp = __ballot_sync(~0u, begins[i]);
        runs_before += __popc(of_warp & ((1u << lane_) - 1));
        runs += __popc(of_warp);
      }
      uint32_t scan = keys;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t up = __shfl_up_sync(~0u, scan, step);
        scan += lane_ >= step ? up : 0;
      }
      Sums* of_warps = s_.warp_runs[turn];
      if (lane_ == 31) of_warps[warp_] = {runs, scan};
      __syncthreads();
      const Sums of_warp = lane_ < kLookupWarps ? of_warps[lane_] : Sums();
      const bool is_before = lane_ < warp_;
      const Sums at = {all.a + runs_before + __reduce_add_sync(~0u, is_before ? of_warp.a : 0),
                       all.b + scan - keys + __reduce_add_sync(~0u, is_before ? of_warp.b : 0)};
      write(own, begins, at);
      all.a += __reduce_add_sync(~0u, of_warp.a);
      all.b += __reduce_add_sync(~0u, of_warp.b);
    }
    if (thread_ == 0) end_lists(p_, pair_, pair_ % p_.kv_heads, all, 0);
  }

  // `at`: runs and keys before those of this thread.
  __device__ void write(const Buckets& own, const bool (&begins)[4], Sums at) const {
    const RunLists& lists = p_.lists;
    uint32_t* first = lists.first + pair_ * (lists.capacity + 1) + at.a;
    uint32_t* before = lists.before + pair_ * (lists.capacity + 1) + at.a;
    uint32_t ends[4], runs = 0, end = at.b;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (begins[i]) {
        first[runs] = own.first[i];
        before[runs] = end;
      }
      runs += begins[i] ? 1 : 0;
      end += own.size[i];
      ends[i] = end;
    }
    uint32_t* marks = lists.marks + pair_ * lists.mark_capacity;
#pragma unroll 1
    for (uint32_t m = (at.b + kMarkKeys - 1) / kMarkKeys; m * kMarkKeys < end; ++m) {
      const uint32_t key = m * kMarkKeys;
      uint32_t run = at.a - (begins[0] ? 0 : 1);
#pragma unroll
      for (int i = 0; i < 3; ++i) run += key >= ends[i] && begins[i + 1] ? 1 : 0;
      marks[m] = run;
    }
  }

  const LookupParams& p_;
  ClassifyShared<kDim>& s_;
  float* const scores_;
  const uint2* const spans_;
  uint4* const list_;  // {score, bucket, size} of the digit at the border
  const int pair_, thread_, lane_, warp_;
  const uint32_t end_;
  float best_ = 0, scale_ = 0;
};

}  // namespace sqz::cuda
