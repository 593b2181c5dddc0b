// What a build would take, said before it is run (--dry-run).
#pragma once

#include <cstdint>

#include "formats/checkpoint.h"
#include "libindex/builder.h"
#include "training/runner.h"

namespace sqz {

// Memory and arithmetic of the dense pass of a model over `tokens` tokens.
struct PassPlan {
  uint64_t memory = 0;  // bytes: weights, hidden states, one layer's keys, values and queries
  double flop = 0;
};
PassPlan plan_pass(const ModelConfig& model, int64_t tokens, const RunnerOptions& options);

// Seconds, from arithmetic rates that a core of a current server reaches, or an H200 in bfloat16;
// right to about a factor of two, on another GPU as far as it is another.
double estimate_seconds(double pass_flop, double kmeans_flop, int threads, bool gpu);

}  // namespace sqz
