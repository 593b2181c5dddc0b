// sqz-train-qmodel: trains a query classifier for a model and writes it as a .sqz of kind `qmodel`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/common/tool.h"
#include "training/qmodel.h"

namespace sqz {

struct TrainQmodelArguments {
  std::string model, output;
  std::vector<std::string> texts, test;
  bool force = false;
  QmodelOptions options;
  std::optional<int64_t> checks;  // none: one every kStepsOfACheck steps, at most kMostChecks
  std::string decay = "cosine";   // or "none"
  std::string dtype = "F32";
  std::string run_dtype;
};

void add_train_qmodel_options(CLI::App& app, TrainQmodelArguments& arguments);
Status run_train_qmodel(const TrainQmodelArguments& arguments, const ToolContext& context);

}  // namespace sqz
