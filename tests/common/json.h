// nlohmann's JSON, with which tests read and change what the project writes.
#pragma once

#include <nlohmann/json.hpp>

#include "formats/base/json.h"

namespace sqz {

using Json = nlohmann::json;

inline Json json_of(const JsonText& text) {
  return Json::parse(text.str());
}

}  // namespace sqz
