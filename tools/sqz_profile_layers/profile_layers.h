// sqz-profile-layers: cosines of a model's layers, their groups, and the budgets that follow.
#pragma once

#include <string>
#include <vector>

#include "formats/layers_file.h"
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
  double p = 0.35;  // the paper recommends 0.3 to 0.4
  std::string allocate = kAllocationGroups;
  std::string selector = "squeezed";  // whose losses are measured
  int64_t held_out = 1024;            // tokens behind each window
  int64_t block = 0;                  // of them that share a selection; 0: all
  std::string run_dtype;

  bool measures() const { return allocate == kAllocationMeasured; }
};

void add_profile_options(CLI::App& app, ProfileArguments& arguments);

Status run_profile(const ProfileArguments& arguments, const ToolContext& context);

}  // namespace sqz
