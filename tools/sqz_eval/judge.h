// Measures one context length: every task and setting over the views of all passes.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/common/index_context.h"
#include "tools/sqz_eval/indexes.h"
#include "tools/common/metrics.h"

namespace sqz::eval {

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
    Task task;
    std::string on;
    auto operator<=>(const Measure&) const = default;
  };
  struct Cell {
    std::vector<double> values;  // of the trials
    Reads reads;
  };
  // The sessions of the settings, at first the dense one.
  using Served = std::vector<std::unique_ptr<IndexContext>>;

  Result<Served> open(const Pass& pass, size_t view, const PassIndexes& indexes);
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
