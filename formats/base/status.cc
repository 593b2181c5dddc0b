#include "formats/base/status.h"

namespace sqz {

const char* code_name(Code code) {
  constexpr const char* kNames[] = {
      "ok",          "invalid argument", "not found",     "input/output error",  "corrupt file",
      "unsupported", "mismatch",         "out of memory", "not a finite number", "already exists",
      "cancelled",   "internal error",
  };
  const auto index = static_cast<size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

}  // namespace sqz
