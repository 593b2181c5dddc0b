#include "formats/chat_format.h"

#include <algorithm>

#include "formats/json_fields.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr uint64_t kMostJson = 64 << 20;  // bytes

struct Family {
  ChatFormat format;                           // without BOS and EOS
  std::vector<std::string_view> marks;         // all of them are in a template, as plain() has it,
  std::vector<std::string_view> foreign = {};  // and none of these
};

const std::vector<Family>& families() {
  static const std::vector<Family> kFamilies = {
      // Llama 3.2 puts the day's date there if it can ask for it, and otherwise this one. A context
      // is read once, so it has a fixed date.
      {{"llama-3.1",
        "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\n",
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        {"<|eot_id|>"},
        true},
       {"<|start_header_id|>system<|end_header_id|>\n\n", "Cutting Knowledge Date: December 2023\n",
        "Today Date: ", "26 Jul 2024", "| trim"}},
      {{"llama-3",
        "<|start_header_id|>system<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        {"<|eot_id|>"},
        true},
       {"<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "| trim"},
       {"Cutting Knowledge", "tools", "functions"}},
      {{"chatml-thinking",
        "<|im_start|>system\n",
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n",
        {"<|im_end|>"}},
       {"<|im_end|>", "<|im_start|>assistant\n<think>\n"},
       {"trim", "enable_thinking"}},
      {{"chatml",
        "<|im_start|>system\n",
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
        {"<|im_end|>"}},
       {"<|im_end|>", "<|im_start|>assistant\n"},
       {"trim", "Custom Instructions", "<|im_start|>assistant\n<think>\n"}},
      {{"mistral-7-tekken", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT][INST]", "[/INST]"},
       {"'[SYSTEM_PROMPT]'", "'[/SYSTEM_PROMPT]'", "'[INST]'", "'[/INST]'"}},
      {{"mistral-7", "[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT][INST] ", "[/INST]"},
       {"'[SYSTEM_PROMPT] '", "'[/SYSTEM_PROMPT]'", "'[INST] '", "'[/INST]'"}},
      {{"mistral-3-tekken", "[INST]", "\n\n", "[/INST]"},
       {"'[INST]' + system_message + '\n\n'", "'[/INST]'"}},
      {{"mistral-3", "[INST] ", "\n\n", "[/INST]"},
       {"'[INST] ' + system_message + '\n\n'", "'[/INST]'"}},
      {{"mistral-1", " [INST] ", "\n\n", " [/INST]"},
       {"' [INST] ' + system_message + '\n\n'", "' [/INST]'"}},
      {{"mistral-1-user", "[INST] ", "\n\n", " [/INST]"},
       {"'[INST] ' + message['content'] + ' [/INST]'"},
       {"system"}},
  };
  return kFamilies;
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// A template with each escaped line break as itself and all quotes single.
std::string plain(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text.substr(at, 2) == "\\n") {
      out += '\n';
      ++at;
    } else {
      out += text[at] == '"' ? '\'' : text[at];
    }
  }
  return out;
}

const Family* recognise(const std::string& text) {
  const auto found = [&](std::string_view part) { return contains(text, part); };
  if (found(" {{ ") || found("\n{{ ")) return nullptr;  // writes the white space before it, too
  for (const Family& family : families()) {
    if (std::all_of(family.marks.begin(), family.marks.end(), found) &&
        std::none_of(family.foreign.begin(), family.foreign.end(), found)) {
      return &family;
    }
  }
  return nullptr;
}

std::string family_names() {
  std::string out;
  for (const Family& family : families()) out += (out.empty() ? "" : ", ") + family.format.name;
  return out;
}

std::string config_path(const std::string& folder) {
  return folder + "/tokenizer_config.json";
}

// The object of tokenizer_config.json; null if there is no such file.
Result<JsonDocument> read_config(const std::string& folder, Env& env) {
  if (!env.exists(config_path(folder))) return JsonDocument();
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(env, config_path(folder), kMostJson));
  return parse_json_object(text, config_path(folder));
}

// The text of a special token, which is a string or an object; "" if there is none.
std::string token_text(const JsonValue& config, std::string_view key) {
  const JsonValue* token = config.find(key);
  if (token != nullptr && token->is_object()) token = token->find("content");
  return token == nullptr ? "" : std::string(token->string());
}

// As Python's str.strip() does it.
std::string_view stripped(std::string_view text) {
  const auto is_stripped = [](uint32_t code) {
    return is_white_space(code) || (code >= 0x1c && code <= 0x1f);
  };
  while (!text.empty()) {
    size_t at = 0;
    if (!is_stripped(next_char(text, at))) break;
    text.remove_prefix(at);
  }
  while (!text.empty()) {
    size_t at = previous_char(text, text.size());
    const size_t rest = at;
    if (!is_stripped(next_char(text, at))) break;
    text = text.substr(0, rest);
  }
  return text;
}

TextPart given(const ChatFormat& chat, std::string_view text) {
  const bool trim = chat.trim && !find_invalid_utf8(text);  // which the tokenizer refuses
  return {trim ? stripped(text) : text, false};
}

Status encode_turn(const Tokenizer& tokenizer, std::string_view before, const TextPart& text,
                   std::string_view after, std::vector<int32_t>& ids) {
  if (text.text.empty()) return {Code::kInvalidArgument, "the text is empty"};
  const TextPart parts[] = {{before}, text, {after}};
  return tokenizer.encode_parts(parts, ids);
}

}  // namespace

Result<std::string> read_chat_template(const std::string& folder, Env& env) {
  const std::string jinja = folder + "/chat_template.jinja";
  if (env.exists(jinja)) return read_text_file(env, jinja, kMostJson);
  SQZ_ASSIGN_OR_RETURN(const JsonDocument config, read_config(folder, env));
  const JsonValue* value = config.root().find("chat_template");
  if (value == nullptr || !value->is_array()) {
    return value == nullptr ? std::string() : std::string(value->string());
  }
  for (const JsonValue& entry : value->items()) {  // {"name", "template"}
    const JsonValue* name = entry.find("name");
    const JsonValue* text = entry.find("template");
    if (name != nullptr && text != nullptr && name->string() == "default") {
      return std::string(text->string());
    }
  }
  return std::string();
}

Result<ChatFormat> load_chat_format(const std::string& folder, Env& env) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_chat_template(folder, env));
  if (text.empty()) {
    return Status(Code::kNotFound,
                  concat(folder,
                         ": the model has no chat template (chat_template.jinja, or "
                         "\"chat_template\" in tokenizer_config.json): leave --chat out, "
                         "or give the texts around the turns with --chat-format"));
  }
  const Family* family = recognise(plain(text));
  if (family == nullptr) {
    return Status(Code::kUnsupported,
                  concat(folder, ": the chat template is none of ", family_names(),
                         ": write the texts around its turns to a file with `python -m sqz.chat ",
                         folder, " > F.json`, or by hand, and pass --chat-format F.json"));
  }
  SQZ_ASSIGN_OR_RETURN(const JsonDocument config, read_config(folder, env));
  ChatFormat out = family->format;
  if (contains(text, "bos_token")) {
    const std::string bos = token_text(config.root(), "bos_token");
    if (bos.empty()) {
      return Status(Code::kCorrupt, bad_field(config_path(folder), "bos_token", "nothing",
                                              "a token, which the chat template begins with"));
    }
    out.before = bos + out.before;
  }
  const std::string eos = token_text(config.root(), "eos_token");
  if (!eos.empty() && std::find(out.end.begin(), out.end.end(), eos) == out.end.end()) {
    out.end.push_back(eos);
  }
  return out;
}

Result<ChatFormat> parse_chat_format(std::string_view json, const std::string& label) {
  SQZ_ASSIGN_OR_RETURN(const JsonDocument document, parse_json_object(json, label));
  JsonFields fields(document.root(), label);
  ChatFormat out;
  out.name = fields.text("name", "");
  out.before = fields.text("before");
  out.between = fields.text("between");
  out.after = fields.text("after");
  out.trim = fields.boolean("trim", false);
  if (const JsonValue* end = fields.has("end") ? fields.array("end") : nullptr) {
    for (const JsonValue& token : end->items()) {
      if (token.string().empty()) {
        fields.complain_of("end", found_text(token), "an array of tokens, each a string");
      }
      out.end.emplace_back(token.string());
    }
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  return out;
}

JsonText to_json(const ChatFormat& chat) {
  JsonMembers out = {{"before", chat.before},
                     {"between", chat.between},
                     {"after", chat.after},
                     {"end", chat.end},
                     {"trim", chat.trim}};
  if (!chat.name.empty()) out["name"] = chat.name;
  return out;
}

Result<std::optional<ChatFormat>> chat_of(const SqzFile& index) {
  const JsonText& chat = index.metadata().chat;
  if (chat.is_null()) return std::optional<ChatFormat>();
  SQZ_ASSIGN_OR_RETURN(ChatFormat out,
                       parse_chat_format(chat.str(), index.path() + ": __metadata__.chat"));
  return std::optional(std::move(out));
}

Status encode_context(const Tokenizer& tokenizer, const ChatFormat& chat, std::string_view context,
                      std::vector<int32_t>& ids) {
  return encode_turn(tokenizer, chat.before, given(chat, context), "", ids);
}

Status encode_question(const Tokenizer& tokenizer, const ChatFormat& chat,
                       std::string_view question, std::vector<int32_t>& ids) {
  return encode_turn(tokenizer, chat.between, given(chat, question), chat.after, ids);
}

Result<std::vector<int32_t>> end_tokens(const Tokenizer& tokenizer, const ChatFormat& chat) {
  std::vector<int32_t> out;
  for (const std::string& token : chat.end) {
    const auto id = tokenizer.token_to_id(token);
    if (!id) {
      return Status(Code::kMismatch, concat("chat: the turn ends with \"", token,
                                            "\", which is no token of the tokenizer"));
    }
    out.push_back(*id);
  }
  return out;
}

}  // namespace sqz
