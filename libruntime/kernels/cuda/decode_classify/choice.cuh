// The best buckets of a pair, chosen by one block that knows all scores.
#pragma once

#include "libruntime/kernels/cuda/decode_classify/shared.cuh"
#include "libruntime/kernels/cuda/decode_lookup/rules.cuh"

namespace sqz::cuda {

// Best first until `wanted` keys are nearest, as the rule `budget`. Scores fall into 256 digits of
// equal width between the best and the worst; only the buckets of the digit at which the keys run
// out are compared with each other.
template <int kDim>
class BucketChoice : private LookupRules {
 public:
  // scores, spans: [C] in shared memory; list: workspace, [C].
  __device__ BucketChoice(const LookupParams& params, int pair, ClassifyShared<kDim>& shared,
                          float* scores, uint2* spans, uint32_t* list)
      : LookupRules(params, 1, pair, shared.rules), s_(shared), list_(list) {
    scores_ = scores;
    spans_ = spans;
    end_ = params.level[0].clusters;
  }

  // `best`, `worst`: of this thread's scores, those of -infinity aside. What is not chosen gets
  // score -infinity; runs are written.
  __device__ void run(float best, float worst, uint32_t wanted) {
    tell_range(best, worst);
    __syncthreads();
    find_scale();
#pragma unroll 4
    for (uint32_t j = thread_; j < end_; j += kLookupThreads) {
      if (scores_[j] > -INFINITY) atomicAdd(&rules_.histogram[digit_of(scores_[j])], size_of(j));
    }
    __syncthreads();
    if (warp_ == 0) find_digit(rules_.histogram, lane_, wanted, rules_.found);
    __syncthreads();
    const uint32_t border = rules_.found[0];
#pragma unroll 4
    for (uint32_t j = thread_; j < end_; j += kLookupThreads) {
      if (!(scores_[j] > -INFINITY)) continue;
      const uint32_t digit = digit_of(scores_[j]);
      if (digit == border) list_[atomicAdd(&s_.tied, 1u)] = j;
      if (digit < border) scores_[j] = -INFINITY;
    }
    __syncthreads();
    choose_tied(rules_.found[1]);
    emit(p_.level[0], nullptr);
  }

 private:
  __device__ uint32_t size_of(uint32_t j) const {
    return spans_[j].y - spans_[j].x;
  }

  __device__ void tell_range(float best, float worst) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
      worst = fminf(worst, __shfl_xor_sync(~0u, worst, step));
    }
    if (lane_ == 0) {
      s_.best[warp_] = best;
      s_.worst[warp_] = worst;
    }
    rules_.histogram[thread_] = 0;
    if (thread_ == 0) s_.tied = 0;
  }

  __device__ void find_scale() {
    float best = s_.best[0], worst = s_.worst[0];
#pragma unroll
    for (int w = 1; w < kLookupWarps; ++w) {
      best = fmaxf(best, s_.best[w]);
      worst = fminf(worst, s_.worst[w]);
    }
    worst_ = worst;
    scale_ = best > worst ? 256 / (best - worst) : 0;
  }

  // Never lower for a higher score.
  __device__ uint32_t digit_of(float score) const {
    return min(static_cast<uint32_t>((score - worst_) * scale_), 255u);
  }

  // `left`: keys for the buckets of the list, which together have more, or all that are left.
  __device__ void choose_tied(uint32_t left) {
    const uint32_t count = s_.tied;
    uint64_t dropped = 0;  // of this thread's: shared memory has room for fewer than 64 * 256
    int bit = 0;
#pragma unroll 1
    for (uint32_t i = thread_; i < count; i += kLookupThreads, ++bit) {
      const uint32_t j = list_[i];
      uint32_t before = 0;
#pragma unroll 1
      for (uint32_t k = 0; k < count; ++k) {
        const uint32_t other = list_[k];
        const bool better =
            scores_[other] > scores_[j] || (scores_[other] == scores_[j] && other < j);
        before += better ? size_of(other) : 0;
      }
      const bool chosen = before < left && 2 * uint64_t{left - before} > size_of(j);
      dropped |= uint64_t{chosen ? 0u : 1u} << bit;
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = thread_; i < count; i += kLookupThreads, dropped >>= 1) {
      if ((dropped & 1) != 0) scores_[list_[i]] = -INFINITY;
    }
    __syncthreads();
  }

  ClassifyShared<kDim>& s_;
  uint32_t* list_;
  float worst_ = 0, scale_ = 0;
};

}  // namespace sqz::cuda
