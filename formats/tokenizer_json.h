// tokenizer.json: normalise, split, byte pair encoding, special tokens; and back.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "formats/tokenizer.h"

namespace sqz {

// `text` is the file's content and `path` its name in messages.
Result<std::unique_ptr<Tokenizer>> load_json_tokenizer(std::string_view text,
                                                       const std::string& path);

}  // namespace sqz
