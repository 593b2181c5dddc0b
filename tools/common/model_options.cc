#include "tools/common/model_options.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>

#include "formats/chat_format.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

// "owner/name", as hubs call their models.
bool is_hub_name(const std::string& path) {
  return std::count(path.begin(), path.end(), '/') == 1 && path.find_first_of("./~") > 0 &&
         path.back() != '/';
}

}  // namespace

Status check_model_folder(const std::string& path) {
  constexpr const char* kExpected =
      "a Hugging Face model folder: config.json, *.safetensors and a tokenizer";
  std::error_code error;
  if (fs::is_directory(path, error)) return {};
  if (fs::exists(path, error)) {
    return {Code::kNotFound, concat(path, ": found ",
                                    path.ends_with(".gguf") ? "a GGUF file, which "
                                                              "is not read"
                                                            : "a file",
                                    ", expected ", kExpected)};
  }
  return {Code::kNotFound,
          concat(path, ": no such folder; expected ", kExpected,
                 is_hub_name(path) ? concat(". Nothing is downloaded: get it with `hf download ",
                                            path, " --local-dir FOLDER` and pass FOLDER")
                                   : "")};
}

void warn_of_chat_template(const std::string& path) {
  const auto text = read_chat_template(path);
  if (!text.ok() || text->empty()) return;
  spdlog::warn(
      "{}: the model has a chat template, which is not applied: texts and prompts are taken "
      "as they are, turn markers included; sqz-index build --chat applies it",
      path);
}

void add_run_dtype_option(CLI::App& app, std::string& run_dtype) {
  app.add_option("--run-dtype", run_dtype,
                 "What the model computes in (default: f32 on the CPU, bf16 on a GPU)")
      ->check(CLI::IsMember({"f32", "bf16"}));
}

RunnerOptions runner_options(const std::string& run_dtype, const CommonOptions& common) {
  RunnerOptions out;
  out.device = common.device;
  const bool bf16 = run_dtype == "bf16" || (run_dtype.empty() && common.gpu());
  out.dtype = bf16 ? DType::kBF16 : DType::kF32;
  out.threads = common.threads;
  return out;
}

std::string pass_name(const RunnerOptions& options) {
  const bool gpu = options.device != "cpu", f32 = options.dtype == DType::kF32;
  if (f32 && !gpu) return {};
  return concat(f32 ? "f32" : "bf16", ", ", gpu ? "cuda" : "cpu");
}

}  // namespace sqz
