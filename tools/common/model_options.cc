#include "tools/common/model_options.h"

#include <spdlog/spdlog.h>

#include <filesystem>

#include "formats/base/file.h"
#include "formats/base/json.h"

namespace sqz {

Status check_model_folder(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return {};
  return {Code::kNotFound,
          concat(path, std::filesystem::exists(path, error) ? ": is a file" : ": no such folder",
                 ", expected a Hugging Face model folder: config.json, *.safetensors and a "
                 "tokenizer. Nothing is downloaded and no GGUF is read: `hf download OWNER/NAME "
                 "--local-dir FOLDER` gets one")};
}

std::vector<std::string> with_model_files(std::vector<std::string> inputs,
                                          const std::string& path) {
  for (const char* name : {"config.json", "generation_config.json", "tokenizer.json",
                           "tokenizer_config.json", "model.safetensors.index.json"}) {
    inputs.push_back(concat(path, '/', name));
  }
  std::error_code error;
  std::filesystem::directory_iterator it(path, error), end;
  for (; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".safetensors") inputs.push_back(it->path().string());
  }
  return inputs;
}

void warn_of_chat_template(const std::string& path) {
  const auto text = read_text_file(Env::posix(), path + "/tokenizer_config.json");
  const auto config = text.ok() ? parse_json(*text, path) : JsonDocument();
  const JsonValue* found = config.ok() ? config->root().find("chat_template") : nullptr;
  const bool in_config = found != nullptr && !found->is_null();
  if (!in_config && !Env::posix().exists(path + "/chat_template.jinja")) return;
  spdlog::warn(
      "{}: the model has a chat template, which is not applied: texts and prompts are taken "
      "as they are, turn markers included; sqz-index build --chat F.json applies it",
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
