// How the model of a tool runs, as options.
#pragma once

#include <string>

#include "tools/common/tool.h"
#include "training/runner.h"

namespace sqz {

void add_run_dtype_option(CLI::App& app, std::string& run_dtype);
// `run_dtype`: "f32", "bf16"; empty: f32 on the CPU, bf16 on a GPU.
RunnerOptions runner_options(const std::string& run_dtype, const CommonOptions& common);

}  // namespace sqz
