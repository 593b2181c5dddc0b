// The losses that a spread of the budget over the layers causes on held-out text behind fixed
// contexts, and the part of each layer in them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "libindex/layer_budgets.h"
#include "tools/common/metrics.h"
#include "tools/common/output.h"
#include "tools/common/selector_options.h"
#include "training/runner.h"

namespace sqz {

// A fixed context and the text that follows it.
struct Trial {
  std::string index;              // path; with keys and values
  std::vector<int32_t> held_out;  // tokens; each but the first has a loss
};

struct TrialLosses {
  std::vector<double> nats;     // of every token of every trial
  double budget = 0, keep = 0;  // delivered
};

// The keys that each layer reads with all layers alike, and the losses that it causes alone.
struct LayerLosses {
  std::vector<double> kept;       // [layers] fraction of the clustered keys; 1: read whole
  std::vector<LayerLoss> losses;  // [layers] in nats a token, by fraction of the keys
};

class Trials {
 public:
  // Borrows the runner. `selector` has the budget.
  Trials(Runner& runner, SelectorOptions selector, int threads)
      : runner_(runner), selector_(std::move(selector)), threads_(threads) {}

  void add(Trial trial) { trials_.push_back(std::move(trial)); }

  // kInvalidArgument, naming --budget, if the budget leaves no keys to select.
  Status check_budget() const;

  // `scales`: [layers], as layer_scales of sqz.h; empty: all layers alike.
  Result<TrialLosses> losses(std::span<const double> scales) const;
  Result<TrialLosses> dense_losses() const;

  // One dense pass measures the relative squared error that each layer's attention output would
  // have at several budgets. Then one pass for each layer, in which it alone selects, measures the
  // cost of such an error: half the mean square of the changes of the losses. That is the mean loss
  // that small errors add, with much less noise. `progress` gets 0 .. 1.
  Result<LayerLosses> layer_losses(const TrialLosses& dense,
                                   const std::function<void(double)>& progress) const;

 private:
  struct Curve;
  Result<TrialLosses> run(const SelectorOptions& selector) const;
  Status measure_errors(const Trial& trial, double keep, std::vector<Curve>& curves) const;

  Runner& runner_;
  SelectorOptions selector_;
  int threads_;
  std::vector<Trial> trials_;
};

// Spreads of the budget over the layers by their own losses.
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

}  // namespace sqz
