// sqz-profile-layers: cosines of a model's layers, groups and budgets, as a .sqz of kind `layers`.
#pragma once

#include <string>
#include <vector>

#include "tools/common/tool.h"

namespace sqz {

struct ProfileArguments {
  std::string model, output;
  std::vector<std::string> texts;
  bool force = false;
  int64_t tokens = 0;   // of a window; 0: as many as the model has positions, up to 16384
  int64_t windows = 1;  // of each text; 0: all of it
  int64_t context = 0;  // tokens that the budgets are for; 0: those of a window
  double budget = 0.125;
  double p = 1;
  std::string run_dtype;
};

void add_profile_options(CLI::App& app, ProfileArguments& arguments);
Status run_profile(const ProfileArguments& arguments, const ToolContext& context);

}  // namespace sqz
