// The steps of tokenizer.json: the normalizer changes a text, the pre-tokenizer cuts it into words,
// the model (formats/bpe.h) cuts words into tokens, the post-processor adds special tokens; and the
// decoder goes from tokens back to text.
//
// A step of type "Sequence" is read as its steps. Each step is a function, made from an object of
// the file, and several threads may call it. Types that are not named here are kUnsupported.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/json_fields.h"

namespace sqz {

// Prepend, Replace (of a string), NFC. From valid UTF-8 to valid UTF-8; an empty text stays empty.
using Normalizer = std::function<void(std::string&)>;
Status parse_normalizer(const JsonFields& object, std::vector<Normalizer>& out);

// The normalisation form NFC of valid UTF-8. Linear but for the sorting of runs of combining marks.
void normalize_nfc(std::string& text);

// A part of the text on its way to the model.
struct Piece {
  std::string_view text;
  int32_t token = -1;     // the id of an added token; such a piece is not cut further
  bool at_start = false;  // begins where the caller's text begins
  bool special = true;    // special tokens are looked for in it
};
// Owns the texts that steps make. They keep their addresses.
using TextStore = std::deque<std::string>;

// Split (Isolated, Removed, MergedWithNext), ByteLevel, Digits, Metaspace. Cuts every piece that is
// not an added token. Texts are valid UTF-8 and outlive the pieces, as the store does. No piece of
// the result is empty.
using PreTokenizer = std::function<Status(std::vector<Piece>&, TextStore&)>;
Status parse_pre_tokenizer(const JsonFields& object, std::vector<PreTokenizer>& out);

// TemplateProcessing (its "single" template) and ByteLevel, which moves offsets only.
struct SpecialAffixes {
  std::vector<int32_t> before, after;
};
Status parse_post_processor(const JsonFields& object, std::vector<SpecialAffixes>& out);

// ByteLevel, Replace (of a string), ByteFallback, Fuse, Strip. Rewrites the tokens; their
// concatenation after the last step is the text. Tokens and results are valid UTF-8.
using Decoder = std::function<void(std::vector<std::string>&)>;
Status parse_decoder(const JsonFields& object, std::vector<Decoder>& out);

}  // namespace sqz
