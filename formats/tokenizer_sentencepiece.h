// SentencePiece tokenizer.model, through libsentencepiece.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "formats/tokenizer.h"

namespace sqz {

// `bytes` is the file's content and `path` its name in messages.
Result<std::unique_ptr<Tokenizer>> load_sentencepiece(std::string_view bytes,
                                                      const std::string& path);

}  // namespace sqz
