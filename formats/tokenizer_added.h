// The "added_tokens" of tokenizer.json. They are found in the text before it is split, and the
// model never cuts them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/byte_trie.h"
#include "formats/tokenizer.h"
#include "formats/tokenizer_steps.h"

namespace sqz {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  std::string pattern;  // searched for: the content, normalised if `normalized`
  bool special = false;
  bool single_word = false;  // only where no word character is beside it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and behind it
  bool normalized = false;   // searched for in normalised text
};

// Immutable after parsing.
class AddedTokens {
 public:
  // Reads the array "added_tokens" of the file's root. `normalizer` may be empty.
  static Result<AddedTokens> parse(const JsonObject& root, const Normalizer& normalizer);

  const std::vector<AddedToken>& tokens() const { return tokens_; }

  // Cuts the text at the added tokens and normalises what is between them. No piece is empty.
  // A special token is plain text in a part without `special`, and in normalised text that such a
  // part belongs to.
  Status extract(std::span<const TextPart> parts, const Normalizer& normalizer,
                 std::vector<Piece>& pieces, TextStore& store) const;

 private:
  Status split(const Piece& piece, const ByteTrie& patterns, std::vector<Piece>& out) const;
  Result<bool> stands_alone(std::string_view text, size_t begin, size_t end) const;

  std::vector<AddedToken> tokens_;
  ByteTrie raw_, normalized_;  // patterns; their numbers are indices of tokens_
  std::optional<Regex> word_;  // one word character; only if a token asks for it
};

}  // namespace sqz
