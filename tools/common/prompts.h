// Reads and encodes prompts of users.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/file.h"
#include "formats/chat_format.h"
#include "formats/model_description.h"
#include "formats/tokenizer.h"

namespace sqz {

struct Prompt {
  std::string text, label;  // label: "F: line N", for messages
};

// Returns the prompts of all files, in order. A text file has one prompt a line; empty lines are
// skipped. In a file named *.jsonl every line is a JSON object, and its string `prompt` is the
// prompt, which may contain line breaks. Errors name file and line. A file without a prompt and
// text that is not UTF-8 are kCorrupt.
Result<std::vector<Prompt>> read_prompts(Env& env, const std::vector<std::string>& paths);

// Returns the token ids of each prompt: in the user's turn of `chat`, or without special tokens,
// because the fixed context in front has them. Checks that the vocabulary of `model` has the ids,
// and that prompt and context do not exceed the model's positions.
Result<std::vector<std::vector<int32_t>>> encode_prompts(
    const Tokenizer& tokenizer, const std::vector<Prompt>& prompts, const ModelDescription& model,
    int64_t context, const std::optional<ChatFormat>& chat = std::nullopt);

}  // namespace sqz
