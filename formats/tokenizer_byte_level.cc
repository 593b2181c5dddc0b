#include <array>

#include "formats/tokenizer_steps.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

struct ByteTable {
  std::array<std::string, 256> characters;  // of each byte
  std::array<int, 512> bytes;               // of each character; -1 if none

  ByteTable() {
    bytes.fill(-1);
    uint32_t next = 256;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      // Printable bytes of Latin-1 stand for themselves; the others take the characters from 256
      // on.
      const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
      const uint32_t character = printable ? byte : next++;
      append_utf8(character, characters[byte]);
      bytes[character] = static_cast<int>(byte);
    }
  }
};

const ByteTable& table() {
  static const ByteTable instance;
  return instance;
}

}  // namespace

void append_byte_level(std::string_view bytes, std::string& out) {
  const ByteTable& map = table();
  for (char byte : bytes) out += map.characters[static_cast<unsigned char>(byte)];
}

bool append_byte_level_decoded(std::string_view text, std::string& out) {
  const ByteTable& map = table();
  const size_t before = out.size();
  for (size_t offset = 0; offset < text.size();) {
    const uint32_t character = next_char(text, offset);
    if (character >= map.bytes.size() || map.bytes[character] < 0) {
      out.resize(before);
      return false;
    }
    out.push_back(static_cast<char>(map.bytes[character]));
  }
  return true;
}

}  // namespace sqz
