// Which spread of the budget over the layers is best: candidates, their losses, the choice.
#pragma once

#include <string>
#include <vector>

#include "libindex/layer_budgets.h"
#include "tools/common/output.h"
#include "tools/sqz_profile_layers/trials.h"

namespace sqz {

struct AllocationRequest {
  BudgetRequest budget;       // its p is not used
  std::vector<int> groups;    // [layers]
  std::vector<double> sweep;  // values of p to measure, in (0, 1]
  bool measured = false;      // also by the layers' own losses
};

struct Candidate {
  std::string allocation;       // "uniform", "groups", "measured"
  double p = 1;                 // of groups
  double strength = 1;          // of measured: scales are raised to it, towards uniform
  std::vector<int64_t> budget;  // [layers]
  double loss = 0;              // nats a token
  eval::Samples gain;           // uniform's loss less this one, of stretches of 128 tokens
  double delivered = 0;         // budget

  std::string name() const;  // "groups, p = 0.7"
};

struct Comparison {
  double dense_loss = 0;
  std::vector<Candidate> candidates;  // uniform first
};

Result<Comparison> compare_allocations(const Trials& trials, const AllocationRequest& request,
                                       const std::function<void(double)>& progress);

// The candidate of this allocation with the lowest loss, if it gains more than the gain's standard
// error; else uniform. An index into `candidates`.
size_t best_of(const Comparison& comparison, const std::string& allocation);

JsonText comparison_json(const Comparison& comparison);
// A line a candidate; `chosen` is marked.
std::string comparison_table(const Comparison& comparison, size_t chosen);

}  // namespace sqz
