// Measures one context length: every task and setting over the views of all passes.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/common/index_context.h"
#include "tools/common/metrics.h"
#include "tools/sqz_eval/indexes.h"

namespace sqz::eval {

// Attention outputs of several selectors against dense attention, for the same queries: the tokens
// run through the model with dense attention, and at each layer the sparse sessions attend, too.
//
// error   ||sparse - dense|| / ||dense|| of the attention output of a (layer, head, token): the
//         state over the fixed context merged with the exact attention over the tokens since, which
//         is the input of the rest of the layer
// recall  the part of the dense softmax's mass over the fixed context that is on keys that were
//         read
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

class Judge {
 public:
  // `gpu`: the CUDA device that serves, or none.
  Judge(EvalModel& model, const TrialOptions& options, std::vector<Setting> settings, int threads,
        std::optional<int> gpu)
      : model_(model),
        options_(options),
        settings_(std::move(settings)),
        threads_(threads),
        gpu_(gpu) {}

  // Measures everything with one view.
  Status judge(const Pass& pass, size_t view, const PassIndexes& indexes);

  // The fields of a row for each task and setting.
  std::vector<JsonMembers> rows() const;

 private:
  // A row is of a task and, of error and recall, of the text or the questions.
  struct Measure {
    std::string task;
    std::string on;
    auto operator<=>(const Measure&) const = default;
  };
  struct Cell {
    std::vector<double> values;  // of the trials
    Reads reads;
  };
  // The sessions of the settings, at first the dense one.
  using Served = std::vector<std::unique_ptr<IndexContext>>;

  Result<Served> open(size_t view, const PassIndexes& indexes);
  Status ask(const Fact& fact, std::span<const int32_t> prompt, const Served& served);
  Result<bool> answered(const Fact& fact, std::span<const int32_t> prompt, IndexContext& context);
  Status measure_text(const Pass& pass, const Served& served);
  // Error and recall of the tokens' attention, averaged over `block` tokens; the dense losses.
  Result<std::vector<double>> probe(std::span<const int32_t> tokens, bool losses, int64_t block,
                                    const std::string& on, const Served& served);
  Status add(const Measure& measure, size_t setting, const IndexContext& context,
             const std::vector<double>& values);
  JsonMembers row(const Measure& measure, size_t setting) const;

  EvalModel& model_;
  const TrialOptions& options_;
  std::vector<Setting> settings_;
  int threads_;
  std::optional<int> gpu_;
  std::map<Measure, std::map<size_t, Cell>> cells_;
};

}  // namespace sqz::eval
