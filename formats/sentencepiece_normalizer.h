// What SentencePiece does to text before it looks for pieces: replacement of characters by a table
// of the model (Unicode normalisation, case folding), white space, the dummy prefix.
//
// The table ("precompiled charsmap") is: 4 bytes, little endian, the length of a double array trie;
// the trie; the replacements, each ended by a zero byte. A unit of the trie has 32 bits: label in
// bits 0-7 and 31, whether a key ends in bit 8, the distance of the children in bits 10-30 (times
// 256 if bit 9 is set); or, where a key ends, the offset of its replacement in bits 0-30.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/byte_trie.h"
#include "formats/sentencepiece_model.h"

namespace sqz {

// Immutable.
class SentencePieceNormalizer {
 public:
  // kCorrupt if the table's lengths are wrong or its replacements are not UTF-8. `symbols` has the
  // user-defined pieces, which are left as they are.
  static Result<SentencePieceNormalizer> create(const SentencePieceModel& model,
                                                const ByteTrie& symbols, const std::string& path);

  // `text` is valid UTF-8, and so is the result; kCorrupt if the table cuts characters apart, and
  // kInvalidArgument if it makes more than 4 GiB of the text.
  Result<std::string> apply(std::string_view text) const;

 private:
  // What the beginning of a text becomes, and how many bytes that was.
  struct Prefix {
    std::string_view to;
    size_t length;
  };
  Status read_table(std::string_view table, const std::string& path);
  Prefix replace_prefix(std::string_view text) const;
  Prefix find_rule(std::string_view text) const;
  bool is_identity() const { return units_.empty() && symbols_.empty(); }
  void append_escaped(std::string_view text, std::string& out) const;

  std::string path_;
  ByteTrie symbols_;
  std::vector<uint32_t> units_;
  std::string replacements_;  // ends with a zero byte
  std::string_view space_;    // what a space becomes
  bool add_prefix_ = false;
  bool remove_extra_ = false;
};

}  // namespace sqz
