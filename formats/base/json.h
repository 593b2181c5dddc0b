// JSON from files that nobody vouches for. nlohmann's own parser silently keeps the last of
// duplicate keys and turns integers beyond 64 bits into floats; this one refuses both, and bounds
// the depth.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "formats/base/status.h"

namespace sqz {

using Json = nlohmann::json;

// `label` names the source in messages ("config.json", or "FILE header"). Errors are kCorrupt and
// say at which byte. Refused: duplicate keys in one object, integers outside [-2^63, 2^64), numbers
// that overflow a double, more than 64 levels of nesting, text after the value, invalid UTF-8.
Result<Json> parse_json(std::string_view text, std::string_view label);

}  // namespace sqz
