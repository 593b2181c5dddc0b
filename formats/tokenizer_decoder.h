// The "decoder" of tokenizer.json: from tokens back to text.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "formats/tokenizer_fields.h"

namespace sqz {

// Immutable after parsing.
class Decoder {
 public:
  // The decoder in `owner`'s field `key`; null or absent gives an empty pointer. Done here:
  // Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace; others are kUnsupported.
  static Result<std::unique_ptr<Decoder>> parse(const JsonObject& owner, std::string_view key);
  virtual ~Decoder() = default;

  // Rewrites the tokens; their concatenation after the last step is the text. Tokens and results
  // are valid UTF-8.
  virtual Status apply(std::vector<std::string>& tokens) const = 0;
};

}  // namespace sqz
