#include "formats/base/status.h"

#include <sstream>

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

void Printed::print_text(std::ostream& out, const void* text) {
  out << static_cast<const char*>(text);
}

std::string joined(std::initializer_list<Printed> parts) {
  std::ostringstream out;
  out.exceptions(std::ios_base::badbit);  // without memory it throws: half a text may be a name
  for (const Printed& part : parts) part.print(out, part.value);
  return std::move(out).str();
}

std::string bad_field(Printed file, Printed field, Printed found, Printed expected) {
  return joined({file, ": ", field, ": found ", found, ", expected ", expected});
}

std::string in_quotes(std::string_view text) {
  constexpr size_t kMost = 80;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += "\\x";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    }
  }
  out += text.size() > kMost ? "\"..." : "\"";
  return out;
}

}  // namespace sqz
