#include "formats/tokenizer_steps.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "formats/tokenizer_regex.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

// Makes a step of an object that has its type; complaints are kept in the object.
template <class Step>
struct Maker {
  const char* type;
  Step (*make)(JsonFields&);
};

// Appends the step of `object`, or the steps of the array `list` in a Sequence.
template <class Step, size_t n>
Status parse_steps(JsonFields object, const char* list, const Maker<Step> (&makers)[n],
                   std::vector<Step>& out) {
  const std::string type = object.text("type");
  if (type == "Sequence") {
    const JsonValue* steps = object.array(list);
    for (size_t i = 0; steps != nullptr && i < steps->size(); ++i) {
      SQZ_RETURN_IF_ERROR(parse_steps(object.element(list, i), list, makers, out));
    }
    return object.status();
  }
  std::string known = "Sequence";
  for (const Maker<Step>& maker : makers) {
    known += concat(", ", maker.type);
    if (type != maker.type) continue;
    Step step = maker.make(object);
    if (object.status().ok()) out.push_back(std::move(step));
    return object.status();
  }
  object.complain("type", "one of " + known, Code::kUnsupported);
  return object.status();
}

// The text that an object's "pattern" replaces.
std::string literal_pattern(JsonFields& object) {
  JsonFields pattern = object.object("pattern");
  if (pattern.has("Regex")) pattern.complain("Regex", "a String", Code::kUnsupported);
  const std::string text = pattern.text("String");
  if (text.empty()) pattern.complain("String", "a text that is not empty");
  object.complain_of(pattern.status());
  return text;
}

void replace_all(std::string& text, const std::string& pattern, const std::string& content) {
  std::string out;
  size_t from = 0;
  for (size_t at = 0; (at = text.find(pattern, from)) != std::string::npos;) {
    out.append(text, from, at - from).append(content);
    from = at + pattern.size();
  }
  if (from == 0) return;
  out.append(text, from);
  text = std::move(out);
}

// Byte-level text: each byte is written as one printable character, as GPT-2 does it.
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

const ByteTable& byte_table() {
  static const ByteTable instance;
  return instance;
}

// The bytes that `token` stands for; `token` itself if a character of it stands for none.
std::string from_byte_level(const std::string& token) {
  const ByteTable& map = byte_table();
  std::string out;
  for (size_t offset = 0; offset < token.size();) {
    const uint32_t character = next_char(token, offset);
    if (character >= map.bytes.size() || map.bytes[character] < 0) return token;
    out.push_back(static_cast<char>(map.bytes[character]));
  }
  return out;
}

enum class SplitBehavior { kIsolated, kRemoved, kMergedWithNext };

// Cuts the matches of `pattern` (or, inverted, the text between them) out of each text.
struct SplitRule {
  Regex pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;
};

struct Part {
  size_t begin;
  size_t end;
  bool match;
};

// The parts of `text` that the rule leaves, in order.
Status find_parts(std::string_view text, RegexMatcher& matcher, const SplitRule& rule,
                  std::vector<Part>& parts) {
  parts.clear();
  const auto add = [&](size_t begin, size_t end, bool match) {
    if (begin == end || (match && rule.behavior == SplitBehavior::kRemoved)) return;
    const bool joins = rule.behavior == SplitBehavior::kMergedWithNext && !match &&
                       !parts.empty() && parts.back().match;
    joins ? void(parts.back() = {parts.back().begin, end, false})
          : parts.push_back({begin, end, match});
  };
  matcher.reset(text);
  size_t covered = 0;
  while (true) {
    SQZ_ASSIGN_OR_RETURN(const std::optional<Span> match, matcher.next());
    if (!match) break;
    add(covered, match->begin, rule.invert);
    add(match->begin, match->end, !rule.invert);
    covered = match->end;
  }
  add(covered, text.size(), rule.invert);
  return {};
}

Status split_pieces(std::vector<Piece>& pieces, const SplitRule& rule) {
  RegexMatcher matcher(rule.pattern);
  std::vector<Part> parts;
  std::vector<Piece> out;
  out.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    if (piece.token >= 0) {
      out.push_back(piece);
      continue;
    }
    SQZ_RETURN_IF_ERROR(find_parts(piece.text, matcher, rule, parts));
    for (const Part& part : parts) {
      out.push_back({piece.text.substr(part.begin, part.end - part.begin), -1,
                     piece.at_start && part.begin == 0});
    }
  }
  pieces = std::move(out);
  return {};
}

// Splits by the rule and writes the words as byte-level text.
Status split_byte_level(std::vector<Piece>& pieces, TextStore& store, bool add_prefix_space,
                        const std::optional<SplitRule>& rule) {
  for (Piece& piece : pieces) {
    if (!add_prefix_space || piece.token >= 0 || piece.text.starts_with(' ')) continue;
    piece.text = store.emplace_back(concat(' ', piece.text));
  }
  if (rule) SQZ_RETURN_IF_ERROR(split_pieces(pieces, *rule));
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.token >= 0 ? 0 : piece.text.size();
  std::string& out = store.emplace_back();
  out.reserve(2 * bytes);  // never grows: the views below must stay valid
  for (Piece& piece : pieces) {
    if (piece.token >= 0) continue;
    const size_t begin = out.size();
    for (const char byte : piece.text) out += byte_table().characters[static_cast<uint8_t>(byte)];
    piece.text = std::string_view(out).substr(begin);
  }
  return {};
}

// Spaces become `replacement`, which also goes to the front: of no piece ("never"), of the text's
// beginning ("first") or of each piece ("always").
void replace_spaces(std::vector<Piece>& pieces, TextStore& store, const std::string& replacement,
                    const std::string& scheme) {
  for (Piece& piece : pieces) {
    if (piece.token >= 0) continue;
    std::string& out = store.emplace_back();
    for (char c : piece.text) c == ' ' ? void(out += replacement) : out.push_back(c);
    const bool wanted = scheme == "always" || (scheme == "first" && piece.at_start);
    if (wanted && !out.starts_with(replacement)) out.insert(0, replacement);
    piece.text = out;
  }
}

Regex compile(JsonFields& object, std::string_view pattern) {
  Result<Regex> regex =
      Regex::compile(pattern, concat(object.label(), ": ", object.name("pattern")));
  object.complain_of(regex.status());
  return regex.ok() ? *std::move(regex) : Regex();
}

PreTokenizer splits_by(SplitRule rule) {
  return [rule = std::move(rule)](std::vector<Piece>& pieces, TextStore&) {
    return split_pieces(pieces, rule);
  };
}

PreTokenizer make_split(JsonFields& object) {
  SplitRule rule;
  JsonFields pattern = object.object("pattern");
  const bool literal = !pattern.has("Regex");
  const std::string text = pattern.text(literal ? "String" : "Regex");
  object.complain_of(pattern.status());
  const std::string behavior = object.text("behavior");
  if (behavior == "Removed") {
    rule.behavior = SplitBehavior::kRemoved;
  } else if (behavior == "MergedWithNext") {
    rule.behavior = SplitBehavior::kMergedWithNext;
  } else if (behavior != "Isolated") {
    object.complain("behavior", "Isolated, Removed or MergedWithNext", Code::kUnsupported);
  }
  rule.invert = object.boolean("invert", false);
  rule.pattern = compile(object, literal ? escape_pattern(text) : text);
  return splits_by(std::move(rule));
}

PreTokenizer make_byte_level(JsonFields& object) {
  constexpr std::string_view kGpt2Pattern =
      "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
  const bool add_prefix_space = object.boolean("add_prefix_space", true);
  std::optional<SplitRule> rule;
  if (object.boolean("use_regex", true)) rule.emplace().pattern = compile(object, kGpt2Pattern);
  return [add_prefix_space, rule](std::vector<Piece>& pieces, TextStore& store) {
    return split_byte_level(pieces, store, add_prefix_space, rule);
  };
}

PreTokenizer make_digits(JsonFields& object) {
  const bool individual = object.boolean("individual_digits", false);
  return splits_by({.pattern = compile(object, individual ? "\\p{N}" : "\\p{N}+")});
}

PreTokenizer make_metaspace(JsonFields& object) {
  const std::string replacement = object.text("replacement");
  if (replacement.empty() || utf8_length(replacement[0]) != replacement.size()) {
    object.complain("replacement", "one character");
  }
  // Files written before "prepend_scheme" existed have "add_prefix_space".
  const bool add_prefix_space = object.boolean("add_prefix_space", true);
  const std::string scheme = object.text("prepend_scheme", add_prefix_space ? "always" : "never");
  if (scheme != "first" && scheme != "never" && scheme != "always") {
    object.complain("prepend_scheme", "\"always\", \"first\" or \"never\"");
  }
  std::optional<SplitRule> rule;
  if (object.boolean("split", true)) {
    rule.emplace().behavior = SplitBehavior::kMergedWithNext;
    rule->pattern = compile(object, escape_pattern(replacement));
  }
  return [=](std::vector<Piece>& pieces, TextStore& store) {
    replace_spaces(pieces, store, replacement, scheme);
    return rule ? split_pieces(pieces, *rule) : Status();
  };
}

using Tokens = std::vector<std::string>;

Decoder make_byte_level_decoder(JsonFields&) {
  return [](Tokens& tokens) {
    std::string bytes;
    for (const std::string& token : tokens) bytes += from_byte_level(token);
    tokens.assign(1, utf8_lossy(std::move(bytes)));
  };
}

Decoder make_fuse(JsonFields&) {
  return [](Tokens& tokens) {
    std::string joined;
    for (const std::string& token : tokens) joined += token;
    tokens.assign(1, std::move(joined));
  };
}

// The byte that a token "<0xNN>" stands for; -1 for every other token.
int byte_of(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int byte = -1;
  const char* end = token.data() + 5;
  const auto [stop, error] = std::from_chars(token.data() + 3, end, byte, 16);
  return error == std::errc() && stop == end ? byte : -1;
}

// Runs of <0xNN> tokens become the text of their bytes, or one U+FFFD each if they form none.
void decode_bytes(Tokens& tokens) {
  Tokens out;
  std::string bytes;
  const auto flush = [&] {
    if (find_invalid_utf8(bytes)) {
      out.insert(out.end(), bytes.size(), "\xef\xbf\xbd");
    } else if (!bytes.empty()) {
      out.push_back(bytes);
    }
    bytes.clear();
  };
  for (std::string& token : tokens) {
    if (const int byte = byte_of(token); byte >= 0) {
      bytes.push_back(static_cast<char>(byte));
    } else {
      flush();
      out.push_back(std::move(token));
    }
  }
  flush();
  tokens = std::move(out);
}

Decoder make_strip(JsonFields& object) {
  const std::string content = object.text("content");
  if (content.empty()) object.complain("content", "one character");
  const int64_t start = object.integer("start", 0, INT32_MAX);
  object.integer("stop", 0, 0);
  return [=](Tokens& tokens) {
    for (std::string& token : tokens) {
      std::string_view left = token;
      for (int64_t i = 0; i < start && left.starts_with(content); ++i) {
        left.remove_prefix(content.size());
      }
      token = std::string(left);
    }
  };
}

Decoder make_replace_decoder(JsonFields& object) {
  return [pattern = literal_pattern(object), content = object.text("content")](Tokens& tokens) {
    for (std::string& token : tokens) replace_all(token, pattern, content);
  };
}

// Appends the ids of a special token, which the object "special_tokens" of a template has.
void append_ids(JsonFields& processor, const std::string& name, std::vector<int32_t>& out) {
  JsonFields token = processor.object("special_tokens").object(name);
  for (const int64_t id : token.integers("ids", 0, INT32_MAX)) {
    out.push_back(static_cast<int32_t>(id));
  }
  processor.complain_of(token.status());
}

SpecialAffixes make_template(JsonFields& processor) {
  SpecialAffixes affixes;
  int texts = 0;
  const JsonValue* items = processor.array("single");
  for (size_t i = 0; items != nullptr && i < items->size(); ++i) {
    JsonFields item = processor.element("single", i);
    if (item.has("Sequence")) {
      if (texts++ > 0) item.complain("Sequence", "the text only once", Code::kUnsupported);
    } else {
      JsonFields special = item.object("SpecialToken");
      const std::string name = special.text("id");
      processor.complain_of(special.status());
      append_ids(processor, name, texts > 0 ? affixes.after : affixes.before);
    }
    processor.complain_of(item.status());
  }
  if (texts == 0) processor.complain("single", "a Sequence, the text's place");
  return affixes;
}

}  // namespace

Status parse_normalizer(const JsonFields& object, std::vector<Normalizer>& out) {
  const Maker<Normalizer> makers[] = {
      {"NFC", [](JsonFields&) { return Normalizer(normalize_nfc); }},
      {"Prepend",
       [](JsonFields& step) -> Normalizer {
         return [prefix = step.text("prepend")](std::string& text) {
           if (!text.empty()) text.insert(0, prefix);
         };
       }},
      {"Replace", [](JsonFields& step) -> Normalizer {
         return [pattern = literal_pattern(step), content = step.text("content")](
                    std::string& text) { replace_all(text, pattern, content); };
       }}};
  return parse_steps(object, "normalizers", makers, out);
}

Status parse_pre_tokenizer(const JsonFields& object, std::vector<PreTokenizer>& out) {
  const Maker<PreTokenizer> makers[] = {{"Split", make_split},
                                        {"ByteLevel", make_byte_level},
                                        {"Digits", make_digits},
                                        {"Metaspace", make_metaspace}};
  return parse_steps(object, "pretokenizers", makers, out);
}

Status parse_post_processor(const JsonFields& object, std::vector<SpecialAffixes>& out) {
  const Maker<SpecialAffixes> makers[] = {
      {"TemplateProcessing", make_template},
      {"ByteLevel", [](JsonFields&) { return SpecialAffixes(); }}};
  return parse_steps(object, "processors", makers, out);
}

Status parse_decoder(const JsonFields& object, std::vector<Decoder>& out) {
  const Maker<Decoder> makers[] = {
      {"ByteLevel", make_byte_level_decoder},
      {"ByteFallback", [](JsonFields&) { return Decoder(decode_bytes); }},
      {"Fuse", make_fuse},
      {"Strip", make_strip},
      {"Replace", make_replace_decoder}};
  return parse_steps(object, "decoders", makers, out);
}

}  // namespace sqz
