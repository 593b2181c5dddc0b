#include "formats/tokenizer_added.h"

#include <algorithm>

#include "formats/utf8.h"

namespace sqz {
namespace {

// What the `regex` crate calls \w, which is what `tokenizers` asks here.
constexpr char kWordCharacter[] = "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200c}\\x{200d}]";

// Unicode White_Space.
bool is_space(uint32_t code) {
  return (code >= 0x9 && code <= 0xd) || code == 0x20 || code == 0x85 || code == 0xa0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
         code == 0x202f || code == 0x205f || code == 0x3000;
}

size_t previous_char(std::string_view text, size_t offset) {
  do {
    --offset;
  } while ((static_cast<unsigned char>(text[offset]) & 0xc0u) == 0x80);
  return offset;
}

size_t skip_spaces_back(std::string_view text, size_t offset, size_t limit) {
  while (offset > limit) {
    const size_t before = previous_char(text, offset);
    size_t at = before;
    if (!is_space(next_char(text, at))) break;
    offset = before;
  }
  return offset;
}

size_t skip_spaces(std::string_view text, size_t offset) {
  while (offset < text.size()) {
    size_t behind = offset;
    if (!is_space(next_char(text, behind))) break;
    offset = behind;
  }
  return offset;
}

Result<AddedToken> parse_token(const JsonObject& object) {
  AddedToken token;
  SQZ_ASSIGN_OR_RETURN(token.id, object.token_id("id"));
  SQZ_ASSIGN_OR_RETURN(token.content, object.string("content"));
  if (token.content.empty()) return object.bad("content", "an empty string", "a token");
  SQZ_ASSIGN_OR_RETURN(token.special, object.boolean("special", false));
  SQZ_ASSIGN_OR_RETURN(token.single_word, object.boolean("single_word", false));
  SQZ_ASSIGN_OR_RETURN(token.lstrip, object.boolean("lstrip", false));
  SQZ_ASSIGN_OR_RETURN(token.rstrip, object.boolean("rstrip", false));
  SQZ_ASSIGN_OR_RETURN(token.normalized, object.boolean("normalized", !token.special));
  return token;
}

}  // namespace

void AddedTokens::Trie::insert(std::string_view pattern, size_t value) {
  size_t node = 0;
  for (char byte : pattern) {
    const auto less = [](const auto& child, char b) { return child.first < b; };
    auto& children = nodes_[node].children;
    const auto it = std::lower_bound(children.begin(), children.end(), byte, less);
    if (it != children.end() && it->first == byte) {
      node = it->second;
    } else {
      const size_t fresh = nodes_.size();
      children.insert(it, {byte, fresh});
      nodes_.emplace_back();
      node = fresh;
    }
  }
  nodes_[node].value = value;
}

std::optional<AddedTokens::Trie::Match> AddedTokens::Trie::find(std::string_view text,
                                                                size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    std::optional<Match> longest;
    size_t node = 0;
    for (size_t at = begin; at < text.size(); ++at) {
      const auto& children = nodes_[node].children;
      const auto it = std::lower_bound(children.begin(), children.end(), text[at],
                                       [](const auto& child, char b) { return child.first < b; });
      if (it == children.end() || it->first != text[at]) break;
      node = it->second;
      if (nodes_[node].value) longest = Match{begin, at + 1, *nodes_[node].value};
    }
    if (longest) return longest;
  }
  return std::nullopt;
}

Result<AddedTokens> AddedTokens::parse(const JsonObject& root, const Normalizer* normalizer) {
  AddedTokens added;
  if (!root.has("added_tokens")) return added;
  SQZ_ASSIGN_OR_RETURN(const JsonValue* items, root.array("added_tokens"));
  for (size_t i = 0; i < items->size(); ++i) {
    SQZ_ASSIGN_OR_RETURN(const JsonObject item, root.element("added_tokens", i));
    SQZ_ASSIGN_OR_RETURN(AddedToken token, parse_token(item));
    token.pattern = token.content;
    if (token.normalized && normalizer != nullptr) {
      SQZ_ASSIGN_OR_RETURN(token.pattern, normalizer->apply(std::move(token.pattern)));
      if (token.pattern.empty()) {
        return item.bad("content", quote_text(token.content),
                        "a token that is not normalized away");
      }
    }
    (token.normalized ? added.normalized_ : added.raw_).insert(token.pattern, i);
    if (token.single_word && !added.word_) {
      SQZ_ASSIGN_OR_RETURN(added.word_, Regex::compile(kWordCharacter, "word character"));
    }
    added.tokens_.push_back(std::move(token));
  }
  return added;
}

Result<bool> AddedTokens::stands_alone(std::string_view text, const Trie::Match& match) const {
  RegexMatcher matcher(*word_);
  const auto is_word = [&](size_t begin) -> Result<bool> {
    matcher.reset(text.substr(begin, utf8_length(text[begin])));
    SQZ_ASSIGN_OR_RETURN(const std::optional<Span> word, matcher.next());
    return word.has_value();
  };
  if (match.begin > 0) {
    SQZ_ASSIGN_OR_RETURN(const bool word, is_word(previous_char(text, match.begin)));
    if (word) return false;
  }
  if (match.end < text.size()) {
    SQZ_ASSIGN_OR_RETURN(const bool word, is_word(match.end));
    if (word) return false;
  }
  return true;
}

Status AddedTokens::split(const Piece& piece, const Trie& trie, std::vector<Piece>& out) const {
  const std::string_view text = piece.text;
  size_t covered = 0;
  const auto keep_until = [&](size_t end) {
    if (covered < end) {
      out.push_back({text.substr(covered, end - covered), -1, piece.at_start && covered == 0});
    }
  };
  size_t from = trie.empty() ? text.size() : 0;
  while (const auto match = trie.find(text, from)) {
    from = match->end;
    const AddedToken& token = tokens_[match->value];
    if (token.single_word) {
      SQZ_ASSIGN_OR_RETURN(const bool alone, stands_alone(text, *match));
      if (!alone) continue;
    }
    const size_t begin =
        token.lstrip ? skip_spaces_back(text, match->begin, covered) : match->begin;
    keep_until(begin);
    out.push_back({text.substr(match->begin, match->end - match->begin), token.id, false});
    covered = token.rstrip ? skip_spaces(text, match->end) : match->end;
  }
  keep_until(text.size());
  return {};
}

Status AddedTokens::extract(std::string_view text, const Normalizer* normalizer,
                            std::vector<Piece>& pieces, TextStore& store) const {
  std::vector<Piece> raw;
  SQZ_RETURN_IF_ERROR(split(Piece{text, -1, true}, raw_, raw));
  for (Piece& piece : raw) {
    if (piece.token >= 0) {
      pieces.push_back(piece);
      continue;
    }
    if (normalizer != nullptr) {
      SQZ_ASSIGN_OR_RETURN(std::string normal, normalizer->apply(std::string(piece.text)));
      piece.text = store.emplace_back(std::move(normal));
    }
    SQZ_RETURN_IF_ERROR(split(piece, normalized_, pieces));
  }
  return {};
}

}  // namespace sqz
