// Attention outputs of several selectors against dense attention, for the same queries: the tokens
// run through the model with dense attention, and at each layer the sparse sessions are asked what
// they would have answered.
//
// output error   ||sparse - dense|| / ||dense|| of the attention output of a (layer, head, token):
//                the state over the fixed context merged with the exact attention over the tokens
//                since, which is what the layer goes on with
// context error  the same for the state over the fixed context alone
// recall         the part of the dense softmax's mass over the fixed context that is on keys that
//                were read
#pragma once

#include <vector>

#include "training/runner.h"

namespace sqz::eval {

// Per token, means over layers and query heads.
struct ProbeResult {
  std::vector<double> error, context_error, recall;
};

class Probe {
 public:
  // Borrows the contexts. `count` tokens will be run.
  Probe(const ModelDescription& model, std::vector<FixedContext*> sparse, int64_t count);

  // The observer of a run whose context is dense.
  Status observe(const ObservedAttention& dense);

  // One for each sparse context, after the run.
  std::vector<ProbeResult> results() const;

 private:
  struct State {
    const float* out;  // [T, Hq, d]
    const float* lse;  // [T, Hq]
  };
  void compare(const State& sparse, const State& dense, const State& own, ProbeResult& sums) const;

  const ModelDescription& model_;
  std::vector<FixedContext*> sparse_;
  int64_t count_;
  std::vector<ProbeResult> sums_;  // over layers and heads
  std::vector<float> out_, lse_;   // of one sparse context
};

}  // namespace sqz::eval
