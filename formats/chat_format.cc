#include "formats/chat_format.h"

#include "formats/json_fields.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

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

Result<ChatFormat> parse_chat_format(std::string_view json, const std::string& label) {
  SQZ_ASSIGN_OR_RETURN(const JsonDocument document, parse_json_object(json, label));
  JsonFields fields(document.root(), label);
  ChatFormat out;
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
  return {{"before", chat.before},
          {"between", chat.between},
          {"after", chat.after},
          {"end", chat.end},
          {"trim", chat.trim}};
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
