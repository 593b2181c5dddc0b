#include "tools/common/prompts.h"

#include <algorithm>

#include "formats/json_fields.h"
#include "formats/utf8.h"
#include "tools/common/texts.h"

namespace sqz {
namespace {

Result<std::string> prompt_of_json(const std::string& line, const std::string& label) {
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json, parse_json(line, label));
  JsonFields fields(json.root(), label);
  std::string prompt = fields.text("prompt");
  SQZ_RETURN_IF_ERROR(fields.status());
  return prompt;
}

Result<std::string> prompt_of_text(const std::string& line, const std::string& label) {
  const auto bad = find_invalid_utf8(line);
  if (!bad) return line;
  return Status(Code::kCorrupt, concat(label, ": text: not valid UTF-8 at byte ", *bad));
}

Status read_file(Env& env, const std::string& path, std::vector<Prompt>& out) {
  const bool json = path.ends_with(".jsonl");
  const size_t before = out.size();
  SQZ_RETURN_IF_ERROR(
      each_line(env, path, [&](const std::string& line, int64_t, const std::string& label) {
        SQZ_ASSIGN_OR_RETURN(std::string prompt,
                             json ? prompt_of_json(line, label) : prompt_of_text(line, label));
        if (prompt.empty()) {
          return Status(Code::kCorrupt, bad_field(label, "prompt", "an empty text", "some text"));
        }
        out.push_back({std::move(prompt), label});
        return Status();
      }));
  if (out.size() > before) return {};
  return {Code::kCorrupt, bad_field(path, "prompts", "none", "at least one, one a line")};
}

Status check_ids(std::span<const int32_t> ids, const std::string& label,
                 const ModelDescription& model, int64_t context) {
  if (ids.empty()) return {Code::kCorrupt, bad_field(label, "tokens", "none", "some")};
  const int64_t highest = *std::max_element(ids.begin(), ids.end());
  if (highest >= model.vocab_size) {
    return {Code::kMismatch,
            bad_field(label, "token id", concat(highest),
                      concat("below ", model.vocab_size, ", the vocabulary of the model"))};
  }
  const int64_t most = model.max_positions - context;
  if (std::ssize(ids) <= most) return {};
  return {Code::kInvalidArgument,
          bad_field(label, "tokens", concat(ids.size()),
                    concat("at most ", most, ": the model has ", model.max_positions,
                           " positions, the context ", context, " tokens"))};
}

}  // namespace

Result<std::vector<Prompt>> read_prompts(Env& env, const std::vector<std::string>& paths) {
  std::vector<Prompt> out;
  for (const std::string& path : paths) SQZ_RETURN_IF_ERROR(read_file(env, path, out));
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
    SQZ_RETURN_IF_ERROR(check_ids(ids, prompt.label, model, context));
  }
  return out;
}

}  // namespace sqz
