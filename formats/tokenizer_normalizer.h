// The "normalizer" of tokenizer.json: what happens to text before it is split into words.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tokenizer_fields.h"

namespace sqz {

// Immutable after parsing.
class Normalizer {
 public:
  // The normalizer in `owner`'s field `key`; null or absent gives an empty pointer. Done here:
  // Sequence, Prepend, Replace, NFC, NFD, NFKC, NFKD; others are kUnsupported.
  static Result<std::unique_ptr<Normalizer>> parse(const JsonObject& owner, std::string_view key);
  virtual ~Normalizer() = default;

  // `text` is valid UTF-8, and so is the result. An empty text stays empty.
  virtual Result<std::string> apply(std::string text) const = 0;
};

// The four Unicode normalisation forms; the text is valid UTF-8. Linear but for the sorting of runs
// of combining marks.
enum class UnicodeForm { kNfc, kNfd, kNfkc, kNfkd };
std::string unicode_normalize(std::string text, UnicodeForm form);

// The regular expression that a {"String": ...} or {"Regex": ...} pattern stands for.
Result<std::string> parse_pattern(const JsonObject& owner);

}  // namespace sqz
