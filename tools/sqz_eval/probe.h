// Attention outputs of several selectors against dense attention, for the same queries: the tokens
// run through the model with dense attention, and at each layer the sparse sessions attend, too.
//
// error   ||sparse - dense|| / ||dense|| of the attention output of a (layer, head, token): the
//         state over the fixed context merged with the exact attention over the tokens since, which
//         is the input of the rest of the layer
// recall  the part of the dense softmax's mass over the fixed context that is on keys that were
//         read
#pragma once

#include <vector>

#include "training/runner.h"

namespace sqz::eval {

// Per token, means over layers and query heads.
struct ProbeResult {
  std::vector<double> error, recall;
};

class Probe {
 public:
  // Borrows the contexts. `count` tokens will be run.
  Probe(std::vector<FixedContext*> sparse, int64_t count) : sparse_(std::move(sparse)) {
    const std::vector<double> zeros(static_cast<size_t>(count));
    sums_.assign(sparse_.size(), {zeros, zeros});
  }

  // The observer of a run whose context is dense.
  Status observe(const ObservedAttention& dense);

  // One for each sparse context, after the run.
  std::vector<ProbeResult> results() const;

 private:
  std::vector<FixedContext*> sparse_;
  std::vector<ProbeResult> sums_;  // over layers and heads
  double terms_ = 1;               // layers and heads that were summed
  int64_t first_ = -1;             // position of the first token
};

}  // namespace sqz::eval
