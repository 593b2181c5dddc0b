#include "formats/sentencepiece_normalizer.h"

#include <algorithm>

#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr const char* kTable = "normalizer_spec.precompiled_charsmap";
constexpr size_t kLongestResult = size_t{4} << 30;
// Bytes of a key; a damaged trie may have circles, in which a text of any length goes round.
constexpr size_t kLongestKey = 1024;

uint32_t little_endian(std::string_view bytes, size_t offset) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) {
    value |= uint32_t{static_cast<unsigned char>(bytes[offset + i])} << (8 * i);
  }
  return value;
}

uint32_t label_of(uint32_t unit) {
  return unit & 0x800000ffu;
}

bool ends_key(uint32_t unit) {
  return (unit >> 8 & 1) != 0;
}

uint32_t children_of(uint32_t unit) {
  return unit >> 10 << ((unit & 0x200u) >> 6);
}

}  // namespace

Status SentencePieceNormalizer::read_table(std::string_view table, const std::string& path) {
  const auto bad = [&](std::string_view found, std::string_view expected) {
    return Refuse{path}(kTable, found, expected);
  };
  if (table.size() <= 4) return bad(concat(table.size(), " bytes"), "a trie and replacements");
  const size_t length = little_endian(table, 0);
  table.remove_prefix(4);
  if (length == 0 || length % 4 != 0 || length >= table.size()) {
    return bad(concat("a trie of ", length, " bytes"),
               concat("a multiple of 4 below ", table.size()));
  }
  for (size_t i = 0; i < length; i += 4) units_.push_back(little_endian(table, i));
  replacements_ = table.substr(length);
  if (const auto offset = find_invalid_utf8(replacements_)) {
    return bad(concat("invalid UTF-8 at byte ", *offset, " of the replacements"), "valid UTF-8");
  }
  if (replacements_.back() != '\0') return bad("no zero byte at the end", "one");
  return {};
}

Result<SentencePieceNormalizer> SentencePieceNormalizer::create(const SentencePieceModel& model,
                                                                const ByteTrie& symbols,
                                                                const std::string& path) {
  SentencePieceNormalizer self;
  if (!model.charsmap.empty()) SQZ_RETURN_IF_ERROR(self.read_table(model.charsmap, path));
  self.path_ = path;
  self.symbols_ = symbols;
  self.space_ = model.escape_whitespaces ? "\u2581" : " ";
  self.add_prefix_ = model.add_dummy_prefix;
  self.remove_extra_ = model.remove_extra_whitespaces;
  return self;
}

// The rule of the longest key that `text` begins with; length 0 if there is none. The units are the
// file's: an index may be anything.
SentencePieceNormalizer::Prefix SentencePieceNormalizer::find_rule(std::string_view text) const {
  Prefix rule{{}, 0};
  if (units_.empty()) return rule;
  uint32_t position = children_of(units_[0]);
  for (size_t i = 0; i < std::min(text.size(), kLongestKey); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    position ^= byte;
    if (position >= units_.size() || label_of(units_[position]) != byte) break;
    const uint32_t unit = units_[position];
    position ^= children_of(unit);
    if (!ends_key(unit) || position >= units_.size()) continue;
    const size_t begin = units_[position] & 0x7fffffffu;
    if (begin < replacements_.size()) rule = {replacements_.data() + begin, i + 1};
  }
  return rule;
}

SentencePieceNormalizer::Prefix SentencePieceNormalizer::replace_prefix(
    std::string_view text) const {
  if (!symbols_.empty()) {
    const size_t length = symbols_.longest(text).length;
    if (length > 0) return {text.substr(0, length), length};
  }
  const Prefix rule = find_rule(text);
  if (rule.length > 0) return rule;
  const size_t length = std::min(utf8_length(text[0]), text.size());
  return {text.substr(0, length), length};
}

void SentencePieceNormalizer::append_escaped(std::string_view text, std::string& out) const {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    out.append(text, begin, end - begin);
    if (end < text.size()) out.append(space_);
    begin = end + 1;
  }
}

Result<std::string> SentencePieceNormalizer::apply(std::string_view text) const {
  while (remove_extra_ && !text.empty()) {
    const Prefix prefix = replace_prefix(text);
    if (prefix.to != " ") break;
    text.remove_prefix(prefix.length);
  }
  std::string out;
  if (text.empty()) return out;
  out.reserve(text.size() + text.size() / 2 + space_.size());
  if (add_prefix_) out.append(space_);
  if (is_identity() && !remove_extra_) {
    append_escaped(text, out);
    return out;
  }
  bool after_space = remove_extra_;
  while (!text.empty()) {
    const Prefix prefix = replace_prefix(text);
    std::string_view to = prefix.to;
    while (after_space && to.starts_with(' ')) to.remove_prefix(1);
    append_escaped(to, out);
    if (!to.empty()) after_space = remove_extra_ && to.ends_with(' ');
    text.remove_prefix(prefix.length);
    if (out.size() > kLongestResult) {
      return Status(Code::kInvalidArgument, "text: more than 4 GiB when normalised");
    }
  }
  while (remove_extra_ && out.ends_with(space_)) out.resize(out.size() - space_.size());
  if (const auto offset = find_invalid_utf8(out)) {
    return Refuse{path_}(kTable,
                         concat("a rule that makes invalid UTF-8 at byte ", *offset, " of a text"),
                         "rules for whole characters");
  }
  return out;
}

}  // namespace sqz
