// UTF-8: checked once at the border, then read without checks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sqz {

// The offset of the first byte that does not begin or continue a well-formed character (overlong
// forms, surrogates and values above U+10FFFF are ill-formed); empty if all of `text` is valid.
std::optional<size_t> find_invalid_utf8(std::string_view text);

// Bytes of the character that `lead` begins, in text known to be valid.
inline size_t utf8_length(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

// The character that begins at `offset` of valid text; `offset` moves behind it.
uint32_t next_char(std::string_view text, size_t& offset);

// Where the character that ends at `offset` of valid text begins.
inline size_t previous_char(std::string_view text, size_t offset) {
  do {
    --offset;
  } while ((static_cast<unsigned char>(text[offset]) & 0xc0u) == 0x80);
  return offset;
}

// Unicode White_Space.
inline bool is_white_space(uint32_t code) {
  return (code >= 0x9 && code <= 0xd) || code == 0x20 || code == 0x85 || code == 0xa0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
         code == 0x202f || code == 0x205f || code == 0x3000;
}

void append_utf8(uint32_t code_point, std::string& out);

// `bytes` with every maximal ill-formed part replaced by one U+FFFD (Unicode chapter 3.9, "maximal
// subparts": what Rust's from_utf8_lossy does).
std::string utf8_lossy(std::string bytes);

}  // namespace sqz
