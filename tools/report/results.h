// What sqz-eval, sqz-profile-layers and sqz-train-qmodel printed with --json, as far as a report
// shows it. The lines may come from a run that was interrupted: sqz-eval's rows of finished context
// lengths, and of the one that it was at, are taken.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/layers_file.h"
#include "formats/qmodel_file.h"
#include "tools/report/allocations.h"
#include "tools/report/svg_plot.h"

namespace sqz {

// A row of sqz-eval (docs/eval.md).
struct EvalRow {
  std::string task, on;  // `on`: "text", "questions" or ""
  int64_t tokens = 0;
  std::string setting;  // "squeezed, 2 levels, rule budget", what makes a line of a plot
  bool dense = false;
  std::string skipped;  // why there are no values; only asked_budget is there then
  int64_t trials = 0;
  double value = 0, error = 0;
  std::optional<double> difference, difference_error;  // to dense
  double asked_budget = 0, budget = 0;                 // delivered
  double asked_keep = 0, keep = 0;                     // of the clustered keys
};

struct MethodRecall {
  std::string method;  // "classifier", "kmeans", ...
  bool far_queries = false;
  std::string keys;                  // what selectivity is a share of: "window", "seen", "far"
  std::vector<QmodelRecall> recall;  // ascending selectivity
};

// A run of sqz-train-qmodel.
struct TrainingResult {
  std::vector<PlotPoint> checks;  // step, loss
  std::vector<MethodRecall> scores;
};

struct ToolResults {
  std::vector<EvalRow> rows;
  std::optional<LayersFile> layers;  // without the description of the model
  std::optional<MeasuredAllocations> measured;
  std::optional<TrainingResult> training;
};

// Whether a file's first byte is that of a JSON object: no .sqz file begins so.
bool is_json_file(const std::string& path);

// kCorrupt for what is none of it: file, line, field, found and expected.
Result<ToolResults> read_results(const std::string& path);

}  // namespace sqz
