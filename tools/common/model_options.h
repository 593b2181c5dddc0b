// The model folder of a tool, and the options that say how the model runs.
#pragma once

#include <string>
#include <vector>

#include "tools/common/tool.h"
#include "training/runner.h"

namespace sqz {

// Checks that `path` is a folder. Returns kNotFound for a file (for example a GGUF) and for a name
// that does not exist; the message says that nothing is downloaded from a model hub. Does not look
// inside the folder.
Status check_model_folder(const std::string& path);
// Adds to the inputs of a run the files of the model folder `path` that it reads.
std::vector<std::string> with_model_files(std::vector<std::string> inputs, const std::string& path);
// Logs a warning if the model has a chat template, because it is not applied.
void warn_of_chat_template(const std::string& path);

void add_run_dtype_option(CLI::App& app, std::string& run_dtype);
// `run_dtype` is "f32", "bf16" or empty: f32 on the CPU, bf16 on a GPU.
RunnerOptions runner_options(const std::string& run_dtype, const CommonOptions& common);
// BuildOptions::pass, for example "bf16, cuda"; empty for f32 on the CPU.
std::string pass_name(const RunnerOptions& options);

}  // namespace sqz
