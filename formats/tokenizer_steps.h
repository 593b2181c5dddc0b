// The steps of tokenizer.json: the normalizer changes a text, the pre-tokenizer cuts it into words,
// the model (formats/bpe.h) cuts words into tokens, the post-processor adds special tokens; and the
// decoder goes from tokens back to text.
//
// Each step is a function, made from an object of the file, and several threads may call it. Types
// that are not named here are kUnsupported.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tokenizer_fields.h"
#include "formats/tokenizer_regex.h"

namespace sqz {

// Sequence, Prepend, Replace, NFC, NFD, NFKC, NFKD. From valid UTF-8 to valid UTF-8; an empty text
// stays empty.
using Normalizer = std::function<Result<std::string>(std::string)>;
Result<Normalizer> parse_normalizer(const JsonObject& object);

// The four Unicode normalisation forms; the text is valid UTF-8. Linear but for the sorting of runs
// of combining marks.
enum class UnicodeForm { kNfc, kNfd, kNfkc, kNfkd };
std::string unicode_normalize(std::string text, UnicodeForm form);

// The regular expression of `owner`'s field "pattern": {"String": ...} or {"Regex": ...}.
Result<Regex> parse_pattern(const JsonObject& owner);

// A part of the text on its way to the model.
struct Piece {
  std::string_view text;
  int32_t token = -1;     // the id of an added token; such a piece is not cut further
  bool at_start = false;  // begins where the caller's text begins
  bool special = true;    // special tokens are looked for in it
};
// Owns the texts that steps make. They keep their addresses.
using TextStore = std::deque<std::string>;

// Sequence, Split, ByteLevel, Digits, Metaspace. Cuts every piece that is not an added token. Texts
// are valid UTF-8 and outlive the pieces, as the store does. No piece of the result is empty.
using PreTokenizer = std::function<Status(std::vector<Piece>&, TextStore&)>;
Result<PreTokenizer> parse_pre_tokenizer(const JsonObject& object);

// Byte-level text: each byte is written as one printable character, as GPT-2 does it.
void append_byte_level(std::string_view bytes, std::string& out);
// Appends the bytes that `text` stands for. Returns false and appends nothing if a character of it
// stands for no byte.
bool append_byte_level_decoded(std::string_view text, std::string& out);

// TemplateProcessing (its "single" template), ByteLevel (which moves offsets only), Sequence.
struct SpecialAffixes {
  std::vector<int32_t> before, after;
};
Result<SpecialAffixes> parse_post_processor(const JsonObject& object);

// Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace. Rewrites the tokens; their
// concatenation after the last step is the text. Tokens and results are valid UTF-8.
using Decoder = std::function<Status(std::vector<std::string>&)>;
Result<Decoder> parse_decoder(const JsonObject& object);

}  // namespace sqz
