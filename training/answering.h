// One answer while it comes: which token is next, and whether it goes on.
#pragma once

#include "formats/base/stopwatch.h"
#include "training/sampler.h"
#include "training/step_engine.h"

namespace sqz::training {

// kInvalidArgument unless the options can be met, and the model has the prompt's ids and positions.
// `first`: position of the prompt's first token.
Status check_generate(const ModelConfig& config, std::span<const int32_t> prompt,
                      const GenerateOptions& options, int64_t first);

class Answering {
 public:
  // `position`: of the first token after the prompt.
  Answering(const ModelConfig& config, const GenerateOptions& options, int64_t position);

  bool greedy() const { return options_.temperature == 0; }
  int64_t most() const { return most_; }  // tokens that the answer may have
  int32_t last() const { return out_.tokens.back(); }
  const std::vector<int32_t>& tokens() const { return out_.tokens; }
  // Picks from row `row` of a step. False: the answer has ended. kNumeric if the row is not finite.
  Result<bool> take(const StepResult& step, size_t row);
  // What take() would pick from rows that follow each other, without taking it.
  Sampler sampler() const { return sampler_; }
  Generation finish();

 private:
  GenerateOptions options_;
  std::vector<int32_t> stops_;
  int64_t position_, most_;
  Sampler sampler_;
  Generation out_;
  Stopwatch watch_;
  bool first_ = true;
};

// Drafts with `context`, checks with options.check.
Result<Generation> generate_checked(const ModelConfig& config, StepEngine& engine,
                                    const BatchQuestion& question, FixedContext& context);

}  // namespace sqz::training
