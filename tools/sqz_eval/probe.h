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

#include <memory>
#include <vector>

#include "tools/sqz_eval/model.h"

namespace sqz::eval {

// Per token, means over layers and query heads.
struct ProbeResult {
  std::vector<double> error, context_error, recall;
};

class Probe final : public FixedContext, public training::LayerObserver {
 public:
  // Borrows the contexts. `count` tokens will be run.
  Probe(const EvalModel& model, FixedContext& dense, std::vector<FixedContext*> sparse,
        int64_t count);

  int64_t tokens() const override { return dense_.tokens(); }
  // Answers with the dense state.
  Status attend(int64_t layer, int64_t first, int64_t count, const float* q, float* out,
                float* lse) override;

  void projected(int64_t first, const at::Tensor& x,
                 const training::Projection& projection) override;
  void attended(int64_t, const at::Tensor&, const at::Tensor&) override {}
  bool needs_output(int64_t, int64_t, int64_t) const override { return true; }

  // One for each sparse context, after the run.
  std::vector<ProbeResult> results() const;

 private:
  struct State {
    const float* out;  // [T, Hq, d]
    const float* lse;  // [T, Hq]
  };
  void compare(const State& sparse, const State& dense, const State& own, ProbeResult& sums) const;

  const ModelDescription& model_;
  FixedContext& dense_;
  std::vector<FixedContext*> sparse_;
  int64_t count_;
  std::unique_ptr<training::KvCache> own_;  // of the layer at hand
  std::vector<ProbeResult> sums_;           // over layers and heads
  std::vector<float> out_, lse_;            // of one sparse context
};

}  // namespace sqz::eval
