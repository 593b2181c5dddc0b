// The "decoder" of tokenizer.json: from tokens back to text.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tokenizer_fields.h"

namespace sqz {

// Rewrites the tokens; their concatenation after the last step is the text. Tokens and results are
// valid UTF-8. Immutable; empty if there is no decoder.
using Decoder = std::function<Status(std::vector<std::string>&)>;

// The decoder in `owner`'s field `key`, which may be null or absent. Done here: Sequence,
// ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace; others are kUnsupported.
Result<Decoder> parse_decoder(const JsonObject& owner, std::string_view key);

}  // namespace sqz
