// Measures one context length: every task and setting over the views of all passes.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/sqz_eval/indexes.h"
#include "tools/sqz_eval/table.h"

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

  // Everything that is measured with a view.
  Status judge(const Pass& pass, size_t view, const PassIndexes& indexes);

  std::vector<Row> rows() const;

 private:
  // A row is of a task and, of error and recall, of the text or the questions.
  struct Measure {
    Task task;
    std::string on;
    auto operator<=>(const Measure&) const = default;
  };
  struct Cell {
    Samples value;
    Reads reads;
  };
  // One opened session of a setting.
  struct Served {
    size_t setting;
    std::unique_ptr<IndexContext> index;
    std::unique_ptr<PlacedContext> context;
  };

  Result<std::vector<Served>> open(const Pass& pass, size_t view, const PassIndexes& indexes);
  Status ask(const Fact& fact, std::span<const int32_t> prompt, std::vector<Served>& served);
  Result<bool> answered(const Fact& fact, std::span<const int32_t> prompt, Served& served);
  Status measure_text(const Pass& pass, std::vector<Served>& served);
  // Error and recall of the tokens' attention, averaged over `block` tokens; the dense losses.
  Result<std::vector<double>> probe(std::span<const int32_t> tokens, bool losses, int64_t block,
                                    const std::string& on, std::vector<Served>& served);
  Status add(const Measure& measure, const Served& served, const std::vector<double>& values);
  Row row(const Measure& measure, size_t setting) const;

  EvalModel& model_;
  const TrialOptions& options_;
  std::vector<Setting> settings_;
  int threads_;
  std::optional<int> gpu_;
  std::map<Measure, std::map<size_t, Cell>> cells_;
};

}  // namespace sqz::eval
