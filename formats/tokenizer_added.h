// The "added_tokens" of tokenizer.json. They are found in the text before it is split, and the
// model never cuts them.
#pragma once

#include <array>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tokenizer.h"
#include "formats/tokenizer_steps.h"

namespace sqz {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  std::string pattern;  // searched for: the content, normalised if `normalized`
  bool special = false;
  bool normalized = false;  // searched for in normalised text
};

// Immutable after parsing.
class AddedTokens {
 public:
  // Reads the array "added_tokens" of the file's root. Tokens with `single_word`, `lstrip` or
  // `rstrip` are kUnsupported.
  static Result<AddedTokens> parse(JsonFields& root, std::span<const Normalizer> normalizers);

  const std::vector<AddedToken>& tokens() const { return tokens_; }

  // Cuts the text at the added tokens and normalises what is between them. No piece is empty.
  // A special token is plain text in a part without `special`, and in normalised text that such a
  // part belongs to.
  void extract(std::span<const TextPart> parts, std::span<const Normalizer> normalizers,
               std::vector<Piece>& pieces, TextStore& store) const;

 private:
  struct Patterns {
    std::map<std::string, size_t, std::less<>> places;  // in tokens_
    std::array<bool, 256> first{};                      // bytes that a pattern begins with

    const size_t* longest(std::string_view text) const;
  };
  void split(const Piece& piece, const Patterns& patterns, std::vector<Piece>& out) const;

  std::vector<AddedToken> tokens_;
  Patterns raw_, normalized_;
};

}  // namespace sqz
