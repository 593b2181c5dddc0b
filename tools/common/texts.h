// From the TEXT... arguments of a tool to the token ids of a fixed context.
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

namespace sqz {

struct Document {
  std::string path;  // "-" for standard input
};

// Calls visit(line, number, "PATH: line NUMBER") for each line that is not empty, without its end.
Status each_line(Env& env, const std::string& path,
                 const std::function<Status(const std::string& line, int64_t number,
                                            const std::string& label)>& visit);

// Files as given; folders recursively, sorted by path, without hidden files and without those that
// are not text (a zero byte in the first 64 KiB), of which a warning is logged. Fails for what does
// not exist, for a folder without text files, and for a file given by name that is not text.
Result<std::vector<Document>> find_documents(const std::vector<std::string>& arguments);

// The documents one after the other, with the tokenizer's special tokens (BOS) once, at the start.
// `max_tokens` > 0: the first so many only. Text that is not UTF-8 is named with file and byte.
Result<std::vector<int32_t>> encode_documents(const Tokenizer& tokenizer,
                                              std::span<const Document> documents,
                                              int64_t max_tokens);
// The documents as one text in the context's turn of a chat.
Result<std::vector<int32_t>> encode_chat(const Tokenizer& tokenizer,
                                         std::span<const Document> documents,
                                         const ChatFormat& chat);

// Ids inside the model's vocabulary, at least one. `source` names where they come from ("the
// tokenizer of DIR", "F.npy"), `model_path` the model.
Status check_ids(std::span<const int32_t> ids, const ModelDescription& model,
                 const std::string& source, const std::string& model_path);
// Nor more of them than positions.
Status check_tokens(std::span<const int32_t> ids, const ModelDescription& model,
                    const std::string& source, const std::string& model_path);

}  // namespace sqz
