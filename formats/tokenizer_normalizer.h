// The "normalizer" of tokenizer.json: what happens to text before it is split into words.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "formats/tokenizer_fields.h"
#include "formats/tokenizer_regex.h"

namespace sqz {

// Valid UTF-8 to valid UTF-8; an empty text stays empty. Immutable; empty if nothing is to be done.
using Normalizer = std::function<Result<std::string>(std::string)>;

// The normalizer in `owner`'s field `key`, which may be null or absent. Done here: Sequence,
// Prepend, Replace, NFC, NFD, NFKC, NFKD; others are kUnsupported.
Result<Normalizer> parse_normalizer(const JsonObject& owner, std::string_view key);

// The four Unicode normalisation forms; the text is valid UTF-8. Linear but for the sorting of runs
// of combining marks.
enum class UnicodeForm { kNfc, kNfd, kNfkc, kNfkd };
std::string unicode_normalize(std::string text, UnicodeForm form);

// The regular expression of `owner`'s field "pattern": {"String": ...} or {"Regex": ...}.
Result<Regex> parse_pattern(const JsonObject& owner);

}  // namespace sqz
