// The best buckets of a pair and their runs, chosen by one block that knows all scores.
#pragma once

#include "libruntime/kernels/cuda/decode/classify/layout.h"
#include "libruntime/kernels/cuda/decode/lookup/choice.cuh"

namespace sqz::cuda {

class BucketChoice : private Choice<PullTeam<kClassifyThreads>, false> {
 public:
  struct Shared {
    PullTeam<kClassifyThreads>::Shared team;
    CutoffShared cutoff;
  };

  // words, spans: [C] in shared memory, words workspace there.
  __device__ BucketChoice(const LookupParams& params, int pair, Shared& shared, uint32_t* words,
                          uint2* spans)
      : Choice(params, 1, pair, shared.team, reinterpret_cast<char*>(&shared.cutoff)) {
    words_ = words;
    spans_ = spans;
    size_ = static_cast<uint32_t>(params.level[0].clusters);
    clear_bins();
  }

  // By the rule `budget`, from scores [C] that the block has written since its last barrier.
  __device__ void run(const float* scores, uint32_t wanted) {
    __syncthreads();
    // Where every slot has as much, or somewhat above, is the cutoff expected.
    const float even = __log2f(static_cast<float>(p_.group) / static_cast<float>(p_.slots));
    const float* own = scores + thread_ * each();
    const Chosen chosen = choose(
        LookupRule::kBudget, p_.level[0], nullptr, true, wanted, Window::around(even),
        [&] { return none(); }, [] {}, [&](uint32_t i) { return own[i]; });
    emit(chosen, p_.level[0], nullptr);
  }
};
static_assert(sizeof(BucketChoice::Shared) <= kChoiceBytes);

}  // namespace sqz::cuda
