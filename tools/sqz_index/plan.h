// What builds will take (--dry-run).
#pragma once

#include <cstdint>

#include "formats/checkpoint.h"
#include "libindex/builder.h"
#include "tools/common/tool.h"
#include "training/runner.h"

namespace sqz {

// Bytes of a model's dense pass over `tokens` tokens: weights, hidden states, one layer's keys,
// values and queries.
uint64_t pass_memory(const ModelConfig& model, int64_t tokens, const RunnerOptions& options);

// The sum over the indexes of a build: bytes of all, memory of the largest.
class PlanTotal {
 public:
  // `pass`: pass_memory(), on the GPU if `gpu_pass`; 0 without a model.
  void add(const BuildPlan& plan, int64_t tokens, uint64_t pass, bool gpu_pass);
  void print(const ToolContext& context) const;

 private:
  int64_t indexes_ = 0, tokens_ = 0;
  BuildPlan sum_;
};

}  // namespace sqz
