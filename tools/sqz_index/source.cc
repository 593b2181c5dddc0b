#include "tools/sqz_index/source.h"

#include "formats/base/file.h"
#include "formats/npy.h"

namespace sqz {

namespace {

Result<std::optional<ChatFormat>> load_chat(const SourceOptions& options) {
  if (!options.in_turns()) return std::optional<ChatFormat>();
  if (options.chat_format.empty()) {
    SQZ_ASSIGN_OR_RETURN(ChatFormat chat, load_chat_format(options.model));
    return std::optional(std::move(chat));
  }
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(Env::posix(), options.chat_format));
  SQZ_ASSIGN_OR_RETURN(ChatFormat chat, parse_chat_format(text, options.chat_format));
  return std::optional(std::move(chat));
}

}  // namespace

void add_source_options(CLI::App& app, SourceOptions& options) {
  app.add_option("TEXT", options.texts,
                 "Text files, or folders of them (recursive, sorted); - reads standard input");
  app.add_option("--model,-m", options.model, "Model: a Hugging Face checkpoint directory");
  app.add_option("--tokens", options.tokens, "Token ids (.npy) instead of texts");
  app.add_option("--max-tokens", options.max_tokens, "Use the first N tokens only")
      ->check(whole_number(1))
      ->type_name("N");
  add_run_dtype_option(app, options.run_dtype);
}

std::vector<std::string> files_of(const SourceOptions& options) {
  std::vector<std::string> out;
  out.insert(out.end(), {options.tokens, options.chat_format});
  return out;
}

RunnerOptions runner_options(const SourceOptions& source, const CommonOptions& common) {
  return runner_options(source.run_dtype, common);
}

Result<Source> Source::open(const SourceOptions& options) {
  if (options.texts.empty() == options.tokens.empty()) {
    return Status(Code::kInvalidArgument,
                  options.texts.empty()
                      ? "no fixed context was given: name text files or folders, or pass --tokens"
                      : "texts and --tokens were both given: pass one of them");
  }
  SQZ_ASSIGN_OR_RETURN(const Source model, open_model(options, options.tokens.empty()));
  return model.with(options.texts, options.tokens);
}

Result<Source> Source::open_model(const SourceOptions& options, bool tokenizer) {
  if (options.model.empty()) {
    return Status(Code::kInvalidArgument,
                  "no model was given: pass --model DIR, a Hugging Face checkpoint directory");
  }
  SQZ_RETURN_IF_ERROR(check_model_folder(options.model));
  Source out;
  out.options_ = options;
  SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(options.model));
  out.model_ = checkpoint->config();
  if (tokenizer) {
    SQZ_ASSIGN_OR_RETURN(out.tokenizer_, Tokenizer::load(options.model));
    SQZ_ASSIGN_OR_RETURN(std::optional<ChatFormat> chat, load_chat(options));
    SQZ_RETURN_IF_ERROR(out.set_chat(std::move(chat)));
  }
  return out;
}

Status Source::set_chat(std::optional<ChatFormat> chat) {
  if (chat) SQZ_RETURN_IF_ERROR(end_tokens(*tokenizer_, *chat).status());
  chat_ = std::move(chat);
  return {};
}

Result<Source> Source::with(const std::vector<std::string>& texts,
                            const std::string& tokens) const {
  if (!tokens.empty() && options_.in_turns()) {
    return Status(Code::kInvalidArgument,
                  concat(tokens, ": token ids are taken as they are: pass texts with --chat"));
  }
  Source out = *this;
  out.options_.texts = texts;
  out.options_.tokens = tokens;
  if (tokens.empty()) {
    SQZ_ASSIGN_OR_RETURN(out.documents_, find_documents(texts));
  }
  return out;
}

Result<FixedTokens> Source::tokens(std::span<const Document> documents) const {
  FixedTokens out;
  const bool texts = options_.tokens.empty();
  if (texts) {
    SQZ_ASSIGN_OR_RETURN(out.ids,
                         chat_ ? encode_chat(*tokenizer_, documents, *chat_)
                               : encode_documents(*tokenizer_, documents, options_.max_tokens));
    out.tokenizer_hash = tokenizer_->hash();
  } else {
    SQZ_ASSIGN_OR_RETURN(out.ids, read_npy_tokens(Env::posix(), options_.tokens));
  }
  const auto limit = static_cast<size_t>(options_.max_tokens);
  if (limit > 0 && out.ids.size() > limit) out.ids.resize(limit);
  const std::string source = texts ? "the tokenizer of " + options_.model : options_.tokens;
  SQZ_RETURN_IF_ERROR(check_tokens(out.ids, model_.description, source, options_.model));
  return out;
}

std::vector<std::string> Source::files() const {
  std::vector<std::string> out = files_of(options_);
  for (std::string& path : paths_of(documents_)) out.push_back(std::move(path));
  return out;
}

}  // namespace sqz
