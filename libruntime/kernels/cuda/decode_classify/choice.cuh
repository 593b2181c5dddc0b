// The best buckets of a pair, chosen by one block that knows all scores.
#pragma once

#include "libruntime/kernels/cuda/decode_classify/shared.cuh"
#include "libruntime/kernels/cuda/decode_lookup/rules.cuh"

namespace sqz::cuda {

// rank_of() the other way.
__device__ inline float score_of(uint32_t rank) {
  return __uint_as_float((rank & 0x80000000u) != 0 ? rank ^ 0x80000000u : ~rank);
}

// Best first until `wanted` keys are nearest, as the rule `budget`. Scores fall into 256 digits of
// equal width between the best, digit 0, and the worst; only the buckets of the digit at which the
// keys run out are compared with each other.
template <int kDim>
class BucketChoice : private LookupRules {
 public:
  // scores, spans: [C], rounded up to a multiple of 4, in shared memory; list: workspace there,
  // [C]. s.best, s.worst and s.tied are {0, ~0, 0}.
  __device__ BucketChoice(const LookupParams& params, int pair, ClassifyShared<kDim>& shared,
                          float* scores, uint2* spans, uint4* list)
      : LookupRules(params, 1, pair, shared.rules), s_(shared), list_(list) {
    scores_ = scores;
    spans_ = spans;
    end_ = params.level[0].clusters;
  }

  // `best`, `worst`: of this thread's scores, those of -infinity aside. What is not chosen gets
  // score -infinity; runs are written. Thread i has scores [4 i, 4 i + 4) of every kTile of them.
  __device__ void run(float best, float worst, uint32_t wanted) {
    tell_range(best, worst);
    __syncthreads();
    find_scale();
#pragma unroll 1
    for (uint32_t j = 4 * thread_; j < end_; j += kTile) {
      float score[4];
      uint32_t size[4];
      load(j, score, size);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        atomicAdd(&rules_.histogram[digit_of(score[i])], score[i] > -INFINITY ? size[i] : 0);
      }
    }
    __syncthreads();
    const uint2 border = find_border(wanted);
#pragma unroll 1
    for (uint32_t tile = 0; tile < end_; tile += kTile) compare(tile + 4 * thread_, border.x);
    __syncthreads();
    drop_tied(border.y);
    __syncthreads();
    emit(p_.level[0], nullptr);
  }

 private:
  static constexpr uint32_t kTile = 4 * kLookupThreads;

  // Four buckets from j on.
  __device__ void load(uint32_t j, float (&score)[4], uint32_t (&size)[4]) const {
    const float4 s = *reinterpret_cast<const float4*>(scores_ + j);
    const auto* spans = reinterpret_cast<const uint4*>(spans_ + j);
    const uint4 a = spans[0], b = spans[1];
    score[0] = s.x, score[1] = s.y, score[2] = s.z, score[3] = s.w;
    size[0] = a.y - a.x, size[1] = a.w - a.z, size[2] = b.y - b.x, size[3] = b.w - b.z;
  }

  __device__ void tell_range(float best, float worst) {
    const uint32_t most = __reduce_max_sync(~0u, rank_of(best)),
                   least = __reduce_min_sync(~0u, rank_of(worst));
    if (lane_ == 0) {
      atomicMax(&s_.best, most);
      atomicMin(&s_.worst, least);
    }
    rules_.histogram[thread_] = 0;
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

  // {the digit at which the sum of sizes passes `left`, or the last; what is left before it}. Every
  // warp by itself.
  __device__ uint2 find_border(uint32_t left) const {
    const auto* words = reinterpret_cast<const uint4*>(rules_.histogram) + 2 * lane_;
    const uint4 a = words[0], b = words[1];
    const uint32_t own[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    const uint32_t sum = a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
    uint32_t scan = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t up = __shfl_up_sync(~0u, scan, step);
      if (lane_ >= step) scan += up;
    }
    const unsigned passes = __ballot_sync(~0u, scan > left);
    const int lane = passes == 0 ? 31 : __ffs(static_cast<int>(passes)) - 1;
    uint32_t digit = 8 * lane_, before = scan - sum;
    bool fits = true;
#pragma unroll
    for (int i = 0; i < 7; ++i) {
      fits = fits && before + own[i] <= left;
      digit += fits ? 1 : 0;
      before += fits ? own[i] : 0;
    }
    return make_uint2(__shfl_sync(~0u, digit, lane), left - __shfl_sync(~0u, before, lane));
  }

  // Lists those of the digit at the border, drops those behind it.
  __device__ void compare(uint32_t j, uint32_t border) {
    float score[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    uint32_t size[4] = {};
    unsigned tied[4];
    if (j < end_) load(j, score, size);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t digit = digit_of(score[i]);
      tied[i] = __ballot_sync(~0u, score[i] > -INFINITY && digit == border);
      if (j + i < end_ && digit > border) scores_[j + i] = -INFINITY;
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
            make_uint4(__float_as_uint(score[i]), j + i, size[i], 0);
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

  ClassifyShared<kDim>& s_;
  uint4* list_;  // {score, bucket, size} of the digit at the border
  float best_ = 0, scale_ = 0;
};

}  // namespace sqz::cuda
