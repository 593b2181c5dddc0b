#include "formats/utf8.h"

#include <cstring>

namespace sqz {
namespace {

// The length of the well-formed character at `offset`, or 0; `bad` is then the length of the
// maximal ill-formed part (at least 1).
size_t char_at(std::string_view text, size_t offset, size_t& bad) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[offset + i]); };
  const unsigned char lead = byte(0);
  bad = 1;
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // Only the second byte has a range that depends on the lead.
  const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  for (size_t i = 1; i < length; ++i) {
    if (offset + i >= text.size()) return 0;
    if (byte(i) < (i == 1 ? low : 0x80) || byte(i) > (i == 1 ? high : 0xbf)) return 0;
    ++bad;
  }
  return length;
}

}  // namespace

std::optional<size_t> find_invalid_utf8(std::string_view text) {
  size_t offset = 0;
  while (offset < text.size()) {
    uint64_t eight;
    if (offset + sizeof(eight) <= text.size()) {
      std::memcpy(&eight, text.data() + offset, sizeof(eight));
      if ((eight & 0x8080808080808080u) == 0) {
        offset += sizeof(eight);
        continue;
      }
    }
    size_t bad;
    const size_t length = char_at(text, offset, bad);
    if (length == 0) return offset;
    offset += length;
  }
  return std::nullopt;
}

uint32_t next_char(std::string_view text, size_t& offset) {
  const auto byte = [&](size_t i) {
    return uint32_t{static_cast<unsigned char>(text[offset + i])};
  };
  const size_t length = utf8_length(text[offset]);
  uint32_t code = byte(0);
  if (length > 1) {
    code &= 0x7fu >> length;
    for (size_t i = 1; i < length; ++i) code = code << 6 | (byte(i) & 0x3fu);
  }
  offset += length;
  return code;
}

void append_utf8(uint32_t code_point, std::string& out) {
  const auto put = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) return put(code_point);
  const int more = code_point < 0x800 ? 1 : code_point < 0x10000 ? 2 : 3;  // bytes behind the lead
  put((0xff00u >> (more + 1) & 0xff) | code_point >> 6 * more);
  for (int i = more - 1; i >= 0; --i) put(0x80 | (code_point >> 6 * i & 0x3f));
}

std::string utf8_lossy(std::string bytes) {
  if (!find_invalid_utf8(bytes)) return bytes;
  std::string out;
  for (size_t offset = 0; offset < bytes.size();) {
    size_t bad;
    const size_t length = char_at(bytes, offset, bad);
    if (length > 0) {
      out.append(bytes, offset, length);
      offset += length;
    } else {
      append_utf8(0xfffd, out);
      offset += bad;
    }
  }
  return out;
}

}  // namespace sqz
