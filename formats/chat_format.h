// The turns of a chat as an instruct model was trained on them: the texts around a fixed context
// and a question.
//
//   before  CONTEXT  between  QUESTION  after  ANSWER  end
//
// A JSON object {"before", "between", "after", "end": [], "trim"} has the texts; the last two
// members are optional. `python -m sqz.chat` writes it for the template of a model. An index that
// was built with a chat format stores this object (docs/format.md).
//
// Special tokens are written out in the texts and recognised there. In context and question they
// are text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/json.h"
#include "formats/sqz_file.h"
#include "formats/tokenizer.h"

namespace sqz {

struct ChatFormat {
  std::string before;                 // with BOS, if the template has one
  std::string between;                // ends the context's turn and begins the question's
  std::string after;                  // ends the question's turn and begins the answer's
  std::vector<std::string> end = {};  // tokens that end an answer, beside the model's EOS
  bool trim = false;                  // context and question lose the white space at both ends
};

// From JSON text, which `label` names in messages, and back.
Result<ChatFormat> parse_chat_format(std::string_view json, const std::string& label);
JsonText to_json(const ChatFormat& chat);
// The chat format that an index was built with, if any.
Result<std::optional<ChatFormat>> chat_of(const SqzFile& index);

// Append the ids of a context in its turn and of a question in its own. An empty text is
// kInvalidArgument.
Status encode_context(const Tokenizer& tokenizer, const ChatFormat& chat, std::string_view context,
                      std::vector<int32_t>& ids);
Status encode_question(const Tokenizer& tokenizer, const ChatFormat& chat,
                       std::string_view question, std::vector<int32_t>& ids);

// The ids of `chat.end`. kMismatch if one is no token of the tokenizer.
Result<std::vector<int32_t>> end_tokens(const Tokenizer& tokenizer, const ChatFormat& chat);

}  // namespace sqz
