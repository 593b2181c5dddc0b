#include "formats/tokenizer_added.h"

#include <algorithm>

namespace sqz {
namespace {

constexpr size_t kLongestToken = 1024;  // bytes

AddedToken read_token(JsonFields& object, std::span<const Normalizer> normalizers) {
  AddedToken token;
  token.id = static_cast<int32_t>(object.integer("id", 0, INT32_MAX));
  token.content = token.pattern = object.text("content");
  token.special = object.boolean("special", false);
  token.normalized = object.boolean("normalized", !token.special);
  for (const char* key : {"single_word", "lstrip", "rstrip"}) {
    if (object.boolean(key, false)) object.complain(key, "false", Code::kUnsupported);
  }
  const auto check = [&] {
    if (!token.pattern.empty() && token.pattern.size() <= kLongestToken) return;
    object.complain_of("content", concat(token.pattern.size(), " bytes"),
                       concat("1 to ", kLongestToken));
  };
  check();
  for (const Normalizer& normalize : normalizers) {
    if (token.normalized) normalize(token.pattern);
  }
  check();
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

Result<AddedTokens> AddedTokens::parse(JsonFields& root, std::span<const Normalizer> normalizers) {
  AddedTokens added;
  const JsonValue* items = root.has("added_tokens") ? root.array("added_tokens") : nullptr;
  for (size_t i = 0; items != nullptr && i < items->size(); ++i) {
    JsonFields object = root.element("added_tokens", i);
    const AddedToken token = read_token(object, normalizers);
    SQZ_RETURN_IF_ERROR(object.status());
    Patterns& patterns = token.normalized ? added.normalized_ : added.raw_;
    patterns.places[token.pattern] = i;
    patterns.first[static_cast<uint8_t>(token.pattern[0])] = true;
    added.tokens_.push_back(token);
  }
  SQZ_RETURN_IF_ERROR(root.status());
  return added;
}

// The place of the longest pattern that `text` begins with, or null. The greatest pattern that is
// not above the text is the one, or shares a beginning with the text that is at least as long as
// the one.
const size_t* AddedTokens::Patterns::longest(std::string_view text) const {
  if (!first[static_cast<uint8_t>(text[0])]) return nullptr;
  while (!text.empty()) {
    auto at = places.upper_bound(text);
    if (at == places.begin()) return nullptr;
    const std::string& pattern = (--at)->first;
    const auto differ =
        std::mismatch(pattern.begin(), pattern.end(), text.begin(), text.end()).first;
    if (differ == pattern.end()) return &at->second;
    text = text.substr(0, static_cast<size_t>(differ - pattern.begin()));
  }
  return nullptr;
}

// The longest pattern at each place counts, from left to right.
void AddedTokens::split(const Piece& piece, const Patterns& patterns,
                        std::vector<Piece>& out) const {
  const std::string_view text = piece.text;
  size_t covered = 0;
  const auto keep_until = [&](size_t end) {
    if (covered == end) return;
    out.push_back(
        {text.substr(covered, end - covered), -1, piece.at_start && covered == 0, piece.special});
  };
  for (size_t at = 0; at < text.size();) {
    const size_t* place = patterns.longest(text.substr(at));
    if (place == nullptr) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[*place];
    const size_t begin = at;
    at += token.pattern.size();
    if (token.special && !piece.special) continue;
    keep_until(begin);
    out.push_back({text.substr(begin, at - begin), token.id, false});
    covered = at;
  }
  keep_until(text.size());
}

void AddedTokens::extract(std::span<const TextPart> parts, std::span<const Normalizer> normalizers,
                          std::vector<Piece>& pieces, TextStore& store) const {
  std::vector<Piece> raw;
  for (const TextPart& part : parts) {
    split(Piece{part.text, -1, raw.empty(), part.special}, raw_, raw);
  }
  join_texts(raw, store);
  for (Piece& piece : raw) {
    if (piece.token >= 0) {
      pieces.push_back(piece);
      continue;
    }
    if (!normalizers.empty()) {
      std::string& normal = store.emplace_back(piece.text);
      for (const Normalizer& normalize : normalizers) normalize(normal);
      piece.text = normal;
    }
    split(piece, normalized_, pieces);
  }
}

}  // namespace sqz
