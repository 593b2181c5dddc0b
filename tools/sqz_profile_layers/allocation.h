// Spreads of the budget over the layers by their own losses: candidates, their losses, the best
// one.
#pragma once

#include <string>
#include <vector>

#include "libindex/layer_budgets.h"
#include "tools/common/output.h"
#include "tools/sqz_profile_layers/trials.h"

namespace sqz {

struct Candidate {
  double strength = 0;          // 0: uniform; else measured, with the scales raised to it
  std::vector<int64_t> budget;  // [layers]
  double loss = 0;              // nats a token
  std::vector<double> gain;     // uniform's loss less this one, of runs of 128 tokens
  double delivered = 0;         // budget

  std::string name() const;  // "uniform", "measured", "measured, strength 0.5"
};

struct Comparison {
  double dense_loss = 0;
  std::vector<Candidate> candidates;  // uniform first

  // The candidate with the lowest loss of those that gain more than the gain's standard error; else
  // uniform.
  const Candidate& best() const;
};

// `budget`: its p is not used.
Result<Comparison> compare_allocations(const Trials& trials, const BudgetRequest& budget,
                                       const std::function<void(double)>& progress);

JsonText comparison_json(const Comparison& comparison);
// A line a candidate. The best one is marked.
std::string comparison_table(const Comparison& comparison);

}  // namespace sqz
