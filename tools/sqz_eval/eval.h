// The work of sqz-eval: options, passes, views, rows.
#pragma once

#include <string>
#include <vector>

#include "libindex/builder.h"
#include "tools/common/tool.h"
#include "tools/sqz_eval/settings.h"
#include "tools/sqz_eval/trials.h"

namespace sqz::eval {

struct EvalArguments {
  std::string model;
  std::vector<std::string> texts;
  TrialOptions trials;  // the seed is filled in by run_eval()
  SettingOptions settings;
  std::string run_dtype = "f32";
  std::string engine = "auto";  // of the clustering
  std::vector<double> level_fractions = BuildOptions().level_fractions;
  std::string qmodel;  // F.sqz, for the selector saap
};

extern const char* const kDescription;
extern const char* const kHelp;  // examples and how trials are made

void add_eval_options(CLI::App& app, EvalArguments& arguments);
Status run_eval(const EvalArguments& arguments, const ToolContext& context);

}  // namespace sqz::eval
