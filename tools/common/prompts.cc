#include "tools/common/prompts.h"

#include <algorithm>
#include <sstream>

#include "formats/json_fields.h"

namespace sqz {
namespace {

Result<std::string> prompt_of_json(const std::string& line, const std::string& label) {
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json, parse_json(line, label));
  JsonFields fields(json.root(), label);
  std::string prompt = fields.text("prompt");
  SQZ_RETURN_IF_ERROR(fields.status());
  return prompt;
}

Status read_file(Env& env, const std::string& path, std::vector<std::string>& out) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(env, path));
  const bool json = path.ends_with(".jsonl");
  const size_t before = out.size();
  std::istringstream lines(text);
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    if (!json) {
      out.push_back(line);
      continue;
    }
    const std::string label = concat(path, ": line ", number);
    SQZ_ASSIGN_OR_RETURN(std::string prompt, prompt_of_json(line, label));
    if (prompt.empty()) {
      return {Code::kCorrupt, bad_field(label, "prompt", "an empty text", "some text")};
    }
    out.push_back(std::move(prompt));
  }
  if (out.size() > before) return {};
  return {Code::kCorrupt, bad_field(path, "prompts", "none", "at least one, one a line")};
}

}  // namespace

Result<std::vector<std::string>> read_prompts(Env& env, const std::vector<std::string>& paths) {
  std::vector<std::string> out;
  for (const std::string& path : paths) SQZ_RETURN_IF_ERROR(read_file(env, path, out));
  return out;
}

Result<std::vector<std::vector<int32_t>>> encode_prompts(const Tokenizer& tokenizer,
                                                         const std::vector<std::string>& prompts,
                                                         int64_t vocab_size,
                                                         const std::optional<ChatFormat>& chat) {
  std::vector<std::vector<int32_t>> out;
  for (size_t i = 0; i < prompts.size(); ++i) {
    std::vector<int32_t>& ids = out.emplace_back();
    const Status status = chat ? encode_question(tokenizer, *chat, prompts[i], ids)
                               : tokenizer.encode(prompts[i], false, ids);
    if (!status.ok()) {
      return Status(Code::kCorrupt, concat("prompt ", i + 1, ": ", status.message()));
    }
    const int64_t highest = ids.empty() ? -1 : *std::max_element(ids.begin(), ids.end());
    if (highest >= 0 && highest < vocab_size) continue;
    return Status(ids.empty() ? Code::kCorrupt : Code::kMismatch,
                  ids.empty()
                      ? bad_field(concat("prompt ", i + 1), "tokens", "none", "some")
                      : bad_field(concat("prompt ", i + 1), "token id", concat(highest),
                                  concat("below ", vocab_size, ", the vocabulary of the model")));
  }
  return out;
}

}  // namespace sqz
