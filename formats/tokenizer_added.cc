#include "formats/tokenizer_added.h"

#include <algorithm>

#include "formats/utf8.h"

namespace sqz {
namespace {

// What the `regex` crate calls \w, which is what `tokenizers` asks here.
constexpr char kWordCharacter[] = "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200c}\\x{200d}]";

// In bytes. Finding tokens takes up to so many steps at each byte of a text.
constexpr size_t kLongestToken = 1024;

size_t skip_spaces_back(std::string_view text, size_t offset, size_t limit) {
  while (offset > limit) {
    const size_t before = previous_char(text, offset);
    size_t at = before;
    if (!is_white_space(next_char(text, at))) break;
    offset = before;
  }
  return offset;
}

size_t skip_spaces(std::string_view text, size_t offset) {
  while (offset < text.size()) {
    size_t behind = offset;
    if (!is_white_space(next_char(text, behind))) break;
    offset = behind;
  }
  return offset;
}

Result<AddedToken> parse_token(const JsonObject& object) {
  AddedToken token;
  SQZ_ASSIGN_OR_RETURN(token.id, object.token_id("id"));
  SQZ_ASSIGN_OR_RETURN(token.content, object.string("content"));
  const size_t bytes = token.content.size();
  if (bytes == 0) return object.bad("content", "an empty string", "a token");
  if (bytes > kLongestToken) {
    return object.bad("content", concat("a string of ", bytes, " bytes"),
                      concat("at most ", kLongestToken));
  }
  SQZ_ASSIGN_OR_RETURN(token.special, object.boolean("special", false));
  SQZ_ASSIGN_OR_RETURN(token.single_word, object.boolean("single_word", false));
  SQZ_ASSIGN_OR_RETURN(token.lstrip, object.boolean("lstrip", false));
  SQZ_ASSIGN_OR_RETURN(token.rstrip, object.boolean("rstrip", false));
  SQZ_ASSIGN_OR_RETURN(token.normalized, object.boolean("normalized", !token.special));
  return token;
}

// Makes one piece of neighbours that are no tokens.
void join_texts(std::vector<Piece>& pieces, TextStore& store) {
  std::vector<Piece> out;
  for (size_t i = 0; i < pieces.size();) {
    size_t end = i + 1;
    Piece piece = pieces[i];
    if (piece.token < 0) {
      while (end < pieces.size() && pieces[end].token < 0) ++end;
    }
    if (end > i + 1) {
      std::string& text = store.emplace_back();
      for (; i < end; ++i) {
        text += pieces[i].text;
        piece.special = piece.special && pieces[i].special;
      }
      piece.text = text;
    }
    out.push_back(piece);
    i = end;
  }
  pieces = std::move(out);
}

}  // namespace

Result<AddedTokens> AddedTokens::parse(const JsonObject& root, const Normalizer& normalizer) {
  AddedTokens added;
  if (!root.has("added_tokens")) return added;
  SQZ_ASSIGN_OR_RETURN(added.tokens_, root.each("added_tokens", parse_token));
  for (size_t i = 0; i < added.tokens_.size(); ++i) {
    AddedToken& token = added.tokens_[i];
    token.pattern = token.content;
    if (token.normalized && normalizer) {
      SQZ_ASSIGN_OR_RETURN(token.pattern, normalizer(std::move(token.pattern)));
      if (token.pattern.size() > kLongestToken) {
        return root.bad(concat("added_tokens[", i, "].content"),
                        concat("a string of ", token.pattern.size(), " bytes when normalized"),
                        concat("at most ", kLongestToken));
      }
      if (token.pattern.empty()) {
        return root.bad(concat("added_tokens[", i, "].content"), in_quotes(token.content),
                        "a token that is not normalized away");
      }
    }
    (token.normalized ? added.normalized_ : added.raw_)
        .insert(token.pattern, static_cast<int32_t>(i));
    if (token.single_word && !added.word_) {
      SQZ_ASSIGN_OR_RETURN(added.word_, Regex::compile(kWordCharacter, "word character"));
    }
  }
  return added;
}

Result<bool> AddedTokens::stands_alone(std::string_view text, size_t begin, size_t end) const {
  RegexMatcher matcher(*word_);
  std::vector<size_t> neighbours;
  if (begin > 0) neighbours.push_back(previous_char(text, begin));
  if (end < text.size()) neighbours.push_back(end);
  for (const size_t at : neighbours) {
    matcher.reset(text.substr(at, utf8_length(text[at])));
    SQZ_ASSIGN_OR_RETURN(const std::optional<Span> word, matcher.next());
    if (word) return false;
  }
  return true;
}

// The longest pattern at each place counts, from left to right.
Status AddedTokens::split(const Piece& piece, const ByteTrie& patterns,
                          std::vector<Piece>& out) const {
  const std::string_view text = piece.text;
  size_t covered = 0, behind_spaces = 0;
  const auto keep_until = [&](size_t end) {
    if (covered < end) {
      out.push_back(
          {text.substr(covered, end - covered), -1, piece.at_start && covered == 0, piece.special});
    }
  };
  for (size_t at = 0; at < text.size() && !patterns.empty();) {
    const ByteTrie::Match match = patterns.longest(text.substr(at));
    const size_t found = at, end = at + match.length;
    at = std::max(end, at + 1);
    if (match.length == 0) continue;
    const AddedToken& token = tokens_[static_cast<size_t>(match.value)];
    if (token.special && !piece.special) continue;
    if (token.single_word) {
      SQZ_ASSIGN_OR_RETURN(const bool alone, stands_alone(text, found, end));
      if (!alone) continue;
    }
    keep_until(token.lstrip ? skip_spaces_back(text, found, covered) : found);
    out.push_back({text.substr(found, match.length), token.id, false});
    // From within spaces that were skipped before, the same end is found again.
    if (token.rstrip && end > behind_spaces) behind_spaces = skip_spaces(text, end);
    covered = token.rstrip ? behind_spaces : end;
  }
  keep_until(text.size());
  return {};
}

Status AddedTokens::extract(std::span<const TextPart> parts, const Normalizer& normalizer,
                            std::vector<Piece>& pieces, TextStore& store) const {
  std::vector<Piece> raw;
  for (const TextPart& part : parts) {
    SQZ_RETURN_IF_ERROR(split(Piece{part.text, -1, raw.empty(), part.special}, raw_, raw));
  }
  join_texts(raw, store);
  for (Piece& piece : raw) {
    if (piece.token >= 0) {
      pieces.push_back(piece);
      continue;
    }
    if (normalizer) {
      SQZ_ASSIGN_OR_RETURN(std::string normal, normalizer(std::string(piece.text)));
      piece.text = store.emplace_back(std::move(normal));
    }
    SQZ_RETURN_IF_ERROR(split(piece, normalized_, pieces));
  }
  return {};
}

}  // namespace sqz
