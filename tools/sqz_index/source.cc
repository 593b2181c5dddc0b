#include "tools/sqz_index/source.h"

#include <filesystem>

#include "formats/base/file.h"
#include "formats/npy.h"

namespace sqz {

void add_source_options(CLI::App& app, SourceOptions& options) {
  app.add_option("TEXT", options.texts,
                 "Text files, or folders of them (recursive, sorted); - reads standard input");
  app.add_option("--model,-m", options.model, "Model: a Hugging Face checkpoint directory");
  app.add_option("--tokens", options.tokens, "Token ids (.npy) instead of texts");
  app.add_option("--max-tokens", options.max_tokens, "Use the first N tokens only")
      ->check(CLI::PositiveNumber)
      ->type_name("N");
  app.add_option("--run-dtype", options.run_dtype,
                 "What the model computes in (default: f32 on the CPU, bf16 on a GPU)")
      ->check(CLI::IsMember({"f32", "bf16"}));
}

RunnerOptions runner_options(const SourceOptions& source, const CommonOptions& common) {
  RunnerOptions out;
  out.device = common.device;
  const bool gpu = common.device != "cpu";
  const bool bf16 = source.run_dtype == "bf16" || (source.run_dtype.empty() && gpu);
  out.dtype = bf16 ? DType::kBF16 : DType::kF32;
  out.threads = common.threads;
  return out;
}

Result<Source> Source::open(const SourceOptions& options) {
  if (options.texts.empty() == options.tokens.empty()) {
    return Status(Code::kInvalidArgument,
                  options.texts.empty()
                      ? "no fixed context was given: name text files or folders, or pass --tokens"
                      : "texts and --tokens were both given: pass one of them");
  }
  if (options.model.empty()) {
    return Status(Code::kInvalidArgument,
                  "no model was given: pass --model DIR, a Hugging Face checkpoint directory");
  }
  Source out;
  out.options_ = options;
  SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(options.model));
  out.model_ = checkpoint->config();
  if (options.tokens.empty()) {
    SQZ_ASSIGN_OR_RETURN(out.documents_, find_documents(options.texts));
    SQZ_ASSIGN_OR_RETURN(out.tokenizer_, Tokenizer::load(options.model));
  }
  return out;
}

Result<FixedTokens> Source::tokens(std::span<const Document> documents) const {
  FixedTokens out;
  if (tokenizer_ != nullptr) {
    SQZ_ASSIGN_OR_RETURN(out.ids, encode_documents(*tokenizer_, documents, options_.max_tokens));
    out.tokenizer_hash = tokenizer_->hash();
  } else {
    SQZ_ASSIGN_OR_RETURN(out.ids, read_npy_tokens(Env::posix(), options_.tokens));
    const auto limit = static_cast<size_t>(options_.max_tokens);
    if (limit > 0 && out.ids.size() > limit) out.ids.resize(limit);
  }
  const std::string source =
      tokenizer_ != nullptr ? "the tokenizer of " + options_.model : options_.tokens;
  SQZ_RETURN_IF_ERROR(check_tokens(out.ids, model_.description, source, options_.model));
  return out;
}

Status check_output(const std::string& path, bool force) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    return {Code::kInvalidArgument, concat(path, ": is a folder; give the name of a file with -o")};
  }
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty() && !fs::is_directory(folder, error)) {
    return {Code::kInvalidArgument,
            concat(path, ": the folder ", folder.string(), " does not exist; create it first")};
  }
  // Creating the temporary file is the only check that a read-only file system cannot fool; it is
  // removed at once.
  return AtomicFile::create(Env::posix(), path, force).status();
}

}  // namespace sqz
