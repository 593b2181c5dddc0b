// The "post_processor" of tokenizer.json: the special tokens around a text.
#pragma once

#include <vector>

#include "formats/tokenizer_fields.h"

namespace sqz {

struct SpecialAffixes {
  std::vector<int32_t> before;
  std::vector<int32_t> after;
};

// Done here: TemplateProcessing (its "single" template), ByteLevel (which moves offsets only) and
// Sequence; others are kUnsupported. Null or absent adds nothing.
Result<SpecialAffixes> parse_post_processor(const JsonObject& owner, std::string_view key);

}  // namespace sqz
