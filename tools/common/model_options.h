// How the model of a tool runs, as options.
#pragma once

#include <string>
#include <vector>

#include "tools/common/tool.h"
#include "training/runner.h"

namespace sqz {

// `path` is a folder. kNotFound for another file, a GGUF say, and for a name that is none: of a
// model hub, say, from which nothing is downloaded. What is in the folder is not looked at.
Status check_model_folder(const std::string& path);
// The files of the folder that a model may be read from: configuration, weights, tokenizer, chat
// template. Indexes and captures beside them are none.
std::vector<std::string> model_files(const std::string& path);
// One line of warning where the model's folder has a chat template, which is not applied.
void warn_of_chat_template(const std::string& path);

void add_run_dtype_option(CLI::App& app, std::string& run_dtype);
// `run_dtype`: "f32", "bf16"; empty: f32 on the CPU, bf16 on a GPU.
RunnerOptions runner_options(const std::string& run_dtype, const CommonOptions& common);
// For BuildOptions::pass: "bf16, cuda"; empty for f32 on the CPU.
std::string pass_name(const RunnerOptions& options);

}  // namespace sqz
