// Prompts as users write them, from files: what an index is calibrated with.
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

// The prompts of all files, in order. A text file has one a line; empty lines are left out. In a
// file named *.jsonl every line is a JSON object whose string `prompt` is one: it may hold line
// breaks. Errors name file and line; a file without a prompt, and text that is not UTF-8, is
// kCorrupt.
Result<std::vector<Prompt>> read_prompts(Env& env, const std::vector<std::string>& paths);

// The token ids of each, without the tokenizer's special tokens: prompts follow a fixed context
// that has them; or in the user's turn of `chat`. Ids are in the vocabulary of `model`, and as many
// as there are positions behind `context` tokens (kInvalidArgument).
Result<std::vector<std::vector<int32_t>>> encode_prompts(
    const Tokenizer& tokenizer, const std::vector<Prompt>& prompts, const ModelDescription& model,
    int64_t context, const std::optional<ChatFormat>& chat = std::nullopt);

}  // namespace sqz
