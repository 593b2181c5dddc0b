#include "tools/common/texts.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <sstream>

#include "formats/base/file.h"
#include "formats/json_fields.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

constexpr size_t kProbe = 64 << 10;

// The offset of the first zero byte near the start, or npos for text.
Result<size_t> find_zero_byte(const std::string& path) {
  SQZ_ASSIGN_OR_RETURN(const auto file, Env::posix().open_read(path));
  std::string start(std::min<uint64_t>(kProbe, file->size()), '\0');
  SQZ_RETURN_IF_ERROR(file->read(0, std::as_writable_bytes(std::span(start))));
  return start.find('\0');
}

Result<std::vector<std::string>> find_in_folder(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  fs::recursive_directory_iterator it(folder, error), end;
  for (; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with('.')) {
      if (it->is_directory(error)) it.disable_recursion_pending();
    } else if (it->is_regular_file(error)) {
      files.push_back(it->path());
    }
  }
  if (error) return Status(Code::kIo, concat(folder.string(), ": ", error.message()));
  std::sort(files.begin(), files.end());

  std::vector<std::string> out;
  for (const fs::path& file : files) {
    SQZ_ASSIGN_OR_RETURN(const size_t zero, find_zero_byte(file.string()));
    if (zero == std::string::npos) {
      out.push_back(file.string());
    } else {
      spdlog::warn("{}: not a text file (a zero byte at byte {}), left out", file.string(), zero);
    }
  }
  if (!out.empty()) return out;
  return Status(Code::kCorrupt, bad_field(folder.string(), "folder", "no text file",
                                          "at least one file of UTF-8 text"));
}

// Without a byte-order mark.
Result<std::string> read_document(const std::string& path) {
  std::string text;
  if (path == "-") {
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
  } else {
    SQZ_ASSIGN_OR_RETURN(text, read_text_file(Env::posix(), path));
  }
  if (text.starts_with("\xef\xbb\xbf")) text.erase(0, 3);
  return text;
}

Status no_text(std::span<const std::string> documents) {
  return {Code::kCorrupt, bad_field(documents.front(), "text", "nothing", "some text")};
}

}  // namespace

Status each_line(Env& env, const std::string& path,
                 const std::function<Status(const std::string& line, int64_t number,
                                            const std::string& label)>& visit) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(env, path));
  std::istringstream lines(text);
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    SQZ_RETURN_IF_ERROR(visit(line, number, concat(path, ": line ", number)));
  }
  return {};
}

namespace {

Status read_prompt_file(Env& env, const std::string& path, std::vector<Prompt>& out) {
  const bool json = path.ends_with(".jsonl");
  const size_t before = out.size();
  SQZ_RETURN_IF_ERROR(each_line(
      env, path, [&](const std::string& line, int64_t, const std::string& label) -> Status {
        std::string prompt = line;
        if (json) {
          SQZ_ASSIGN_OR_RETURN(const JsonDocument object, parse_json(line, label));
          JsonFields fields(object.root(), label);
          prompt = fields.text("prompt");
          SQZ_RETURN_IF_ERROR(fields.status());
        }
        if (const auto bad = find_invalid_utf8(prompt)) {
          return Status(Code::kCorrupt, concat(label, ": text: not valid UTF-8 at byte ", *bad));
        }
        if (prompt.empty()) {
          return Status(Code::kCorrupt, bad_field(label, "prompt", "an empty text", "some text"));
        }
        out.push_back({std::move(prompt), label});
        return Status();
      }));
  if (out.size() > before) return {};
  return {Code::kCorrupt, bad_field(path, "prompts", "none", "at least one, one a line")};
}

}  // namespace

Result<std::vector<std::string>> find_documents(const std::vector<std::string>& arguments) {
  std::vector<std::string> out;
  for (const std::string& argument : arguments) {
    std::error_code error;
    if (argument == "-") {
      out.push_back(argument);
    } else if (fs::is_directory(argument, error)) {
      SQZ_ASSIGN_OR_RETURN(const auto found, find_in_folder(argument));
      out.insert(out.end(), found.begin(), found.end());
    } else {
      SQZ_ASSIGN_OR_RETURN(const size_t zero, find_zero_byte(argument));
      if (zero != std::string::npos) {
        return Status(Code::kCorrupt,
                      bad_field(argument, concat("byte ", zero), "a zero byte", "UTF-8 text"));
      }
      out.push_back(argument);
    }
  }
  return out;
}

Result<std::vector<int32_t>> encode_documents(const Tokenizer& tokenizer,
                                              std::span<const std::string> documents,
                                              int64_t max_tokens, bool begins) {
  std::vector<int32_t> ids;
  size_t text_bytes = 0;
  for (const std::string& document : documents) {
    SQZ_ASSIGN_OR_RETURN(const std::string text, read_document(document));
    const Status status = tokenizer.encode(text, begins && ids.empty(), ids);
    if (!status.ok()) return Status(Code::kCorrupt, concat(document, ": ", status.message()));
    text_bytes += text.size();
    if (max_tokens > 0 && static_cast<int64_t>(ids.size()) >= max_tokens) {
      ids.resize(static_cast<size_t>(max_tokens));
      break;
    }
  }
  if (text_bytes > 0 && !ids.empty()) return ids;
  return no_text(documents);
}

Result<std::vector<TokenText>> read_texts(std::span<const std::string> documents,
                                          const Tokenizer& tokenizer, const ModelDescription& model,
                                          const std::string& model_path, int64_t max_tokens) {
  std::vector<TokenText> out;
  for (const std::string& document : documents) {
    TokenText& text = out.emplace_back(TokenText{document, {}});
    SQZ_ASSIGN_OR_RETURN(text.tokens, encode_documents(tokenizer, {&document, 1}, max_tokens));
    SQZ_RETURN_IF_ERROR(
        check_ids(text.tokens, model, "the tokenizer of " + model_path, model_path));
  }
  return out;
}

Result<std::vector<int32_t>> encode_chat(const Tokenizer& tokenizer,
                                         std::span<const std::string> documents,
                                         const ChatFormat& chat) {
  std::string all;
  for (const std::string& document : documents) {
    SQZ_ASSIGN_OR_RETURN(const std::string text, read_document(document));
    if (const auto bad = find_invalid_utf8(text)) {
      return Status(Code::kCorrupt, concat(document, ": text: not valid UTF-8 at byte ", *bad));
    }
    all += text;
  }
  if (all.empty()) return no_text(documents);
  std::vector<int32_t> ids;
  SQZ_RETURN_IF_ERROR(encode_context(tokenizer, chat, all, ids));
  return ids;
}

Status check_tokenizer(const std::string& index, const std::string& built_with,
                       const Tokenizer& tokenizer, const std::string& model_path) {
  if (built_with.empty() || built_with == tokenizer.hash()) return {};
  return {Code::kMismatch, bad_field(index, "tokenizer_hash", built_with,
                                     concat(tokenizer.hash(), ", that of ", model_path,
                                            "; use the model that the index was built with"))};
}

Status check_ids(std::span<const int32_t> ids, const ModelDescription& model,
                 const std::string& source, const std::string& model_path) {
  if (ids.empty()) return {Code::kCorrupt, bad_field(source, "tokens", "none", "at least one")};
  const auto highest = std::max_element(ids.begin(), ids.end());
  if (*highest < model.vocab_size) return {};
  return {Code::kMismatch,
          concat(source, " gives token id ", *highest, " (token ", highest - ids.begin(),
                 "), but the vocabulary of ", model_path, " has ", model.vocab_size,
                 " entries: they do not belong together")};
}

Status check_tokens(std::span<const int32_t> ids, const ModelDescription& model,
                    const std::string& source, const std::string& model_path, int64_t front) {
  SQZ_RETURN_IF_ERROR(check_ids(ids, model, source, model_path));
  const int64_t count = front + std::ssize(ids);
  if (count <= model.max_positions) return {};
  return {Code::kUnsupported,
          concat("the fixed context has ", count, " tokens, but ", model_path, " has ",
                 model.max_positions, " positions; give less text, or pass --max-tokens ",
                 model.max_positions - front, " or less")};
}

Result<std::vector<Prompt>> read_prompts(Env& env, const std::vector<std::string>& paths) {
  std::vector<Prompt> out;
  for (const std::string& path : paths) SQZ_RETURN_IF_ERROR(read_prompt_file(env, path, out));
  return out;
}

Result<std::vector<std::vector<int32_t>>> encode_prompts(const Tokenizer& tokenizer,
                                                         const std::vector<Prompt>& prompts,
                                                         const ModelDescription& model,
                                                         int64_t context,
                                                         const std::optional<ChatFormat>& chat) {
  std::vector<std::vector<int32_t>> out;
  for (const Prompt& prompt : prompts) {
    std::vector<int32_t>& ids = out.emplace_back();
    const Status status = chat ? encode_question(tokenizer, *chat, prompt.text, ids)
                               : tokenizer.encode(prompt.text, false, ids);
    if (!status.ok()) {
      return Status(Code::kCorrupt, concat(prompt.label, ": ", status.message()));
    }
    SQZ_RETURN_IF_ERROR(check_ids(ids, model, prompt.label, "the model"));
    const int64_t most = model.max_positions - context;
    if (std::ssize(ids) <= most) continue;
    return Status(Code::kInvalidArgument,
                  bad_field(prompt.label, "tokens", concat(ids.size()),
                            concat("at most ", most, ": the model has ", model.max_positions,
                                   " positions, the context ", context, " tokens")));
  }
  return out;
}

}  // namespace sqz
