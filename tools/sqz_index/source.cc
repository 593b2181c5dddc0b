#include "tools/sqz_index/source.h"

#include <charconv>

#include "formats/base/file.h"

namespace sqz {
namespace {

Result<ChatFormat> load_chat(const std::string& path) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(Env::posix(), path));
  return parse_chat_format(text, path);
}

Result<std::vector<int32_t>> read_ids(const std::string& path) {
  std::vector<int32_t> out;
  SQZ_RETURN_IF_ERROR(each_line(
      Env::posix(), path,
      [&](const std::string& line, int64_t, const std::string& label) -> Status {
        const char* const last = line.data() + line.size();
        const auto [end, error] = std::from_chars(line.data(), last, out.emplace_back());
        if (error == std::errc() && end == last && out.back() >= 0) return {};
        return {Code::kCorrupt, bad_field(label, "token id", in_quotes(line), "a whole number")};
      }));
  return out;
}

}  // namespace

void add_source_options(CLI::App& app, SourceOptions& options) {
  app.add_option("TEXT", options.texts,
                 "Text files, or folders of them (recursive, sorted); - reads standard input");
  app.add_option("--model,-m", options.model, "Model: a Hugging Face checkpoint directory");
  app.add_option("--tokens", options.tokens, "A file of token ids, one a line, instead of texts")
      ->excludes(app.get_option("TEXT"));
  app.add_option("--max-tokens", options.max_tokens, "Use the first N tokens only")
      ->check(whole_number(1))
      ->type_name("N");
  add_run_dtype_option(app, options.run_dtype);
}

std::vector<std::string> named_files(const SourceOptions& options) {
  std::vector<std::string> out = with_model_files(options.texts, options.model);
  out.insert(out.end(), {options.tokens, options.chat});
  return out;
}

Result<Source> Source::open(const SourceOptions& options, bool tokenizer) {
  if (options.model.empty()) {
    return Status(Code::kInvalidArgument,
                  "no model was given: pass --model DIR, a Hugging Face checkpoint directory");
  }
  SQZ_RETURN_IF_ERROR(check_model_folder(options.model));
  Source out;
  out.options_ = options;
  SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(options.model));
  out.model_ = checkpoint->config();
  if (!tokenizer) return out;
  SQZ_ASSIGN_OR_RETURN(out.tokenizer_, Tokenizer::load(options.model));
  if (!options.chat.empty()) {
    SQZ_ASSIGN_OR_RETURN(out.chat_, load_chat(options.chat));
    SQZ_RETURN_IF_ERROR(end_tokens(*out.tokenizer_, *out.chat_).status());
  } else {
    warn_of_chat_template(options.model);
  }
  return out;
}

Result<FixedTokens> Source::read(const std::vector<std::string>& texts, const std::string& tokens,
                                 int64_t front) const {
  FixedTokens out;
  if (!tokens.empty()) {
    if (!options_.chat.empty()) {
      return Status(Code::kInvalidArgument,
                    concat(tokens, ": token ids are taken as they are: pass texts with --chat"));
    }
    SQZ_ASSIGN_OR_RETURN(out.ids, read_ids(tokens));
    out.source = tokens;
  } else {
    SQZ_ASSIGN_OR_RETURN(const std::vector<std::string> documents, find_documents(texts));
    SQZ_ASSIGN_OR_RETURN(
        out.ids, chat_ ? encode_chat(*tokenizer_, documents, *chat_)
                       : encode_documents(*tokenizer_, documents, options_.max_tokens, front == 0));
    out.tokenizer_hash = tokenizer_->hash();
    out.source = "the tokenizer of " + options_.model;
  }
  const auto limit = static_cast<size_t>(options_.max_tokens);
  if (limit > 0 && out.ids.size() > limit) out.ids.resize(limit);
  SQZ_RETURN_IF_ERROR(check_tokens(out.ids, model_.description, out.source, options_.model, front));
  return out;
}

Status no_context() {
  return {Code::kInvalidArgument,
          "no fixed context was given: name text files or folders, or pass --tokens"};
}

}  // namespace sqz
