// sqz-profile-layers: cosines of a model's layers, groups and budgets, as a .sqz of kind `layers`.
#pragma once

#include <string>
#include <vector>

#include "tools/common/tool.h"

namespace sqz {

struct ProfileArguments {
  std::string model, output;
  std::vector<std::string> texts;
  std::string index;  // to profile on, and to embed the budgets into; empty: none
  bool force = false;
  int64_t tokens = 0;   // of a window; 0: as many as the model has positions, up to 16384
  int64_t windows = 1;  // of each text; 0: all of it
  int64_t context = 0;  // tokens that the budgets are for; 0: those of a window
  double budget = 0.125;
  std::string p = "1";  // a number, or "auto"
  std::string allocate = "groups";
  std::string sweep;  // "p=1,0.9": values to measure; empty: none, or with `auto` kStandardSweep
  std::string selector = "squeezed", rule = "budget";  // of what is measured
  int64_t held_out = 1024;                             // tokens behind each window
  int64_t block = 0;                                   // of them that share a selection; 0: all
  std::string run_dtype;

  // Whether losses are measured on held-out text.
  bool measures() const { return !sweep.empty() || p == "auto" || allocate == "measured"; }
};

inline constexpr const char* kStandardSweep = "p=1,0.9,0.8,0.7,0.6,0.5,0.4,0.3";

void add_profile_options(CLI::App& app, ProfileArguments& arguments);

// What of the arguments can be told without a model: numbers of --p and --sweep.
struct ProfileNumbers {
  double p = 1;  // 1 with auto
  std::vector<double> sweep;
};
Result<ProfileNumbers> profile_numbers(const ProfileArguments& arguments);

Status run_profile(const ProfileArguments& arguments, const ToolContext& context);

}  // namespace sqz
