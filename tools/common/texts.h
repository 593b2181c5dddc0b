// Texts of users as token ids: the fixed context that TEXT... arguments name, and prompts.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "formats/base/file.h"
#include "formats/chat_format.h"
#include "formats/model_description.h"
#include "formats/tokenizer.h"
#include "training/runner.h"

namespace sqz {

// Calls visit(line, number, "PATH: line NUMBER") for each line that is not empty, without its end.
Status each_line(Env& env, const std::string& path,
                 const std::function<Status(const std::string& line, int64_t number,
                                            const std::string& label)>& visit);

// Returns the paths of text files; "-" stands for standard input. A folder is searched recursively,
// in the order of paths; hidden files are skipped, and files that are not text (a zero byte in the
// first 64 KiB) are skipped with a warning. A path that does not exist, a folder without text files
// and a named file that is not text are errors.
Result<std::vector<std::string>> find_documents(const std::vector<std::string>& arguments);

// Returns the ids of the documents one after the other, with the tokenizer's special tokens (BOS)
// once, at the start, unless `begins` is false. `max_tokens` > 0 limits them. The error for text
// that is not UTF-8 names file and byte.
Result<std::vector<int32_t>> encode_documents(const Tokenizer& tokenizer,
                                              std::span<const std::string> documents,
                                              int64_t max_tokens, bool begins = true);
// The ids of each document by itself, with the tokenizer's special tokens, which the vocabulary of
// the model has.
Result<std::vector<TokenText>> read_texts(std::span<const std::string> documents,
                                          const Tokenizer& tokenizer, const ModelDescription& model,
                                          const std::string& model_path, int64_t max_tokens);
// Returns the ids of the documents as one text in the context's turn of a chat.
Result<std::vector<int32_t>> encode_chat(const Tokenizer& tokenizer,
                                         std::span<const std::string> documents,
                                         const ChatFormat& chat);

// An index belongs to one tokenizer: kMismatch if it was built with another one. `built_with` is
// the hash in the index; empty if it was built from ids.
Status check_tokenizer(const std::string& index, const std::string& built_with,
                       const Tokenizer& tokenizer, const std::string& model_path);

// Checks that there are ids, and that the vocabulary of the model has them. `source` names where
// they come from ("the tokenizer of DIR", a file of ids), `model_path` the model.
Status check_ids(std::span<const int32_t> ids, const ModelDescription& model,
                 const std::string& source, const std::string& model_path);
// Checks also that with `front` tokens before them there are no more ids than the model has
// positions.
Status check_tokens(std::span<const int32_t> ids, const ModelDescription& model,
                    const std::string& source, const std::string& model_path, int64_t front = 0);

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
