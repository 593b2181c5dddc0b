// The "pre_tokenizer" of tokenizer.json: how normalised text is cut into the words that the model
// then cuts into tokens.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tokenizer_fields.h"

namespace sqz {

// A part of the text on its way to the model.
struct Piece {
  std::string_view text;
  int32_t token = -1;     // the id of an added token; such a piece is not cut further
  bool at_start = false;  // begins where the caller's text begins
};

// Owns text that steps make; what it holds stays where it is.
using TextStore = std::deque<std::string>;

// Cuts every piece that is not an added token. Texts are valid UTF-8 and outlive the pieces, as the
// store does. No piece of the result is empty. Immutable; empty if nothing is to be cut.
using PreTokenizer = std::function<Status(std::vector<Piece>&, TextStore&)>;

// The pre-tokenizer in `owner`'s field `key`, which may be null or absent. Done here: Sequence,
// Split, ByteLevel, Digits, Metaspace; others are kUnsupported.
Result<PreTokenizer> parse_pre_tokenizer(const JsonObject& owner, std::string_view key);

// Byte-level text: each byte is written as one printable character, as GPT-2 does it.
void append_byte_level(std::string_view bytes, std::string& out);
// Appends the bytes that `text` stands for; false, and nothing appended, if it has a character that
// stands for none.
bool append_byte_level_decoded(std::string_view text, std::string& out);

}  // namespace sqz
