// What a spread of the budget over the layers costs: the loss of held-out text behind fixed
// contexts, and each layer's own part in it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "libindex/layer_budgets.h"
#include "tools/common/metrics.h"
#include "tools/common/selector_options.h"
#include "training/runner.h"

namespace sqz {

// One fixed context and what follows it.
struct Trial {
  std::string index;              // path; with keys and values
  std::vector<int32_t> held_out;  // tokens; each but the first has a loss
};

struct TrialLosses {
  std::vector<double> nats;     // of every token of every trial
  double budget = 0, keep = 0;  // delivered
};

// What each layer reads with all layers alike, and what it costs alone.
struct LayerLosses {
  std::vector<double> kept;       // [layers] fraction of the clustered keys; 1: read whole
  std::vector<LayerLoss> losses;  // [layers] in nats a token, by fraction of the keys
};

class Trials {
 public:
  // `selector`: what reads, and its budget. Borrows the runner.
  Trials(Runner& runner, SelectorOptions selector, int threads)
      : runner_(runner), selector_(std::move(selector)), threads_(threads) {}

  void add(Trial trial) { trials_.push_back(std::move(trial)); }

  // kInvalidArgument, naming --budget, if it leaves no key beside what is read in any case.
  Status check_budget() const;

  // `scales`: [layers], as layer_scales of sqz.h; empty: all layers alike.
  Result<TrialLosses> losses(std::span<const double> scales) const;
  Result<TrialLosses> dense_losses() const;

  // The relative squared error of each layer's attention output at several budgets, the other
  // layers dense, in one pass; and for each layer a pass in which it alone selects, which tells
  // what such an error costs: half the mean square of the losses' changes, which is the mean loss
  // that small errors add, but far less noisy. `progress` gets 0 .. 1.
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

}  // namespace sqz
