// The two kinds of tokenizer files. `bytes` is the file's content and `path` its name in messages.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "formats/tokenizer.h"

namespace sqz {

// Bytes of a text that is encoded, at most. Symbols of one word are counted with 32 bits, and
// byte-level text is at most twice as long.
constexpr size_t kLongestText = size_t{1} << 30;

// tokenizer.json: normalise, split, byte pair encoding, special tokens; and back.
Result<std::unique_ptr<Tokenizer>> load_json_tokenizer(std::string_view bytes,
                                                       const std::string& path);

// SentencePiece tokenizer.model: BPE and unigram models, with the ids of libsentencepiece 0.1.97.
// What is not done is named in sentencepiece_model.h.
Result<std::unique_ptr<Tokenizer>> load_sentencepiece(std::string_view bytes,
                                                      const std::string& path);

}  // namespace sqz
