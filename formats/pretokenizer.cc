#include "formats/tokenizer_steps.h"

#include <algorithm>

#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr char kGpt2Pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

// Cuts the matches of `pattern` (or, inverted, what lies between them) out of each text.
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

// Matches and what lies between them, in order, covering all of `text`.
Status find_parts(std::string_view text, RegexMatcher& matcher, bool invert,
                  std::vector<Part>& parts) {
  parts.clear();
  matcher.reset(text);
  size_t covered = 0;
  while (true) {
    SQZ_ASSIGN_OR_RETURN(const std::optional<Span> match, matcher.next());
    if (!match) break;
    if (covered != match->begin) parts.push_back({covered, match->begin, invert});
    parts.push_back({match->begin, match->end, !invert});
    covered = match->end;
  }
  if (covered != text.size()) parts.push_back({covered, text.size(), invert});
  return {};
}

// Joins each part for which `join(is a match, previous is one)` holds with the part before it.
template <class Join>
void merge_parts(std::vector<Part>& parts, Join join) {
  size_t count = 0;
  bool previous = false;
  for (const Part& part : parts) {
    if (count > 0 && join(part.match, previous)) {
      Part& before = parts[count - 1];
      before = {std::min(before.begin, part.begin), std::max(before.end, part.end), before.match};
    } else {
      parts[count++] = part;
    }
    previous = part.match;
  }
  parts.resize(count);
}

void merge(std::vector<Part>& parts, SplitBehavior behavior) {
  const auto lone_match = [](bool match, bool previous) { return match && !previous; };
  switch (behavior) {
    case SplitBehavior::kIsolated:
      break;
    case SplitBehavior::kRemoved:
      std::erase_if(parts, [](const Part& part) { return part.match; });
      break;
    case SplitBehavior::kMergedWithPrevious:
      merge_parts(parts, lone_match);
      break;
    case SplitBehavior::kMergedWithNext:  // the same, from the end
      std::reverse(parts.begin(), parts.end());
      merge_parts(parts, lone_match);
      std::reverse(parts.begin(), parts.end());
      break;
    case SplitBehavior::kContiguous:
      merge_parts(parts, [](bool match, bool previous) { return match == previous; });
      break;
  }
}

// Cuts every piece that is not an added token by the rule; no part is empty.
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
    SQZ_RETURN_IF_ERROR(find_parts(piece.text, matcher, rule.invert, parts));
    merge(parts, rule.behavior);
    for (const Part& part : parts) {
      if (part.begin == part.end) continue;
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
  if (add_prefix_space) {
    for (Piece& piece : pieces) {
      if (piece.token >= 0 || piece.text.starts_with(' ')) continue;
      piece.text = store.emplace_back(concat(' ', piece.text));
    }
  }
  if (rule) SQZ_RETURN_IF_ERROR(split_pieces(pieces, *rule));
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.token >= 0 ? 0 : piece.text.size();
  std::string& out = store.emplace_back();
  out.reserve(2 * bytes);  // never grows: the views below must stay valid
  for (Piece& piece : pieces) {
    if (piece.token >= 0) continue;
    const size_t begin = out.size();
    append_byte_level(piece.text, out);
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

PreTokenizer splits_by(const SplitRule& rule) {
  return [rule](std::vector<Piece>& pieces, TextStore&) { return split_pieces(pieces, rule); };
}

Result<SplitBehavior> parse_behavior(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string name, object.string("behavior"));
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  return object.unsupported("behavior", in_quotes(name));
}

Result<PreTokenizer> parse_split(const JsonObject& object) {
  SplitRule rule;
  SQZ_ASSIGN_OR_RETURN(rule.pattern, parse_pattern(object));
  SQZ_ASSIGN_OR_RETURN(rule.behavior, parse_behavior(object));
  SQZ_ASSIGN_OR_RETURN(rule.invert, object.boolean("invert", false));
  return splits_by(rule);
}

Result<PreTokenizer> parse_byte_level(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const bool add_prefix_space, object.boolean("add_prefix_space", true));
  SQZ_ASSIGN_OR_RETURN(const bool use_regex, object.boolean("use_regex", true));
  std::optional<SplitRule> rule;
  if (use_regex) {
    rule.emplace();
    SQZ_ASSIGN_OR_RETURN(rule->pattern, Regex::compile(kGpt2Pattern, "GPT-2 pattern"));
  }
  return PreTokenizer([add_prefix_space, rule](std::vector<Piece>& pieces, TextStore& store) {
    return split_byte_level(pieces, store, add_prefix_space, rule);
  });
}

Result<PreTokenizer> parse_digits(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const bool individual, object.boolean("individual_digits", false));
  SplitRule rule;
  rule.behavior = individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
  SQZ_ASSIGN_OR_RETURN(rule.pattern, Regex::compile("\\p{N}", "Digits pattern"));
  return splits_by(rule);
}

Result<PreTokenizer> parse_metaspace(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string replacement, object.string("replacement"));
  if (replacement.empty() || utf8_length(replacement[0]) != replacement.size()) {
    return object.bad("replacement", in_quotes(replacement), "one character");
  }
  // Files written before "prepend_scheme" existed have "add_prefix_space".
  SQZ_ASSIGN_OR_RETURN(const bool add_prefix_space, object.boolean("add_prefix_space", true));
  SQZ_ASSIGN_OR_RETURN(const std::string scheme,
                       object.string_or("prepend_scheme", add_prefix_space ? "always" : "never"));
  if (scheme != "first" && scheme != "never" && scheme != "always") {
    return object.bad("prepend_scheme", in_quotes(scheme), "\"always\", \"first\" or \"never\"");
  }
  SQZ_ASSIGN_OR_RETURN(const bool split, object.boolean("split", true));
  SplitRule rule;
  rule.behavior = SplitBehavior::kMergedWithNext;
  SQZ_ASSIGN_OR_RETURN(rule.pattern, Regex::compile(escape_pattern(replacement), "Metaspace"));
  return PreTokenizer([=](std::vector<Piece>& pieces, TextStore& store) {
    replace_spaces(pieces, store, replacement, scheme);
    return split ? split_pieces(pieces, rule) : Status();
  });
}

}  // namespace

Result<PreTokenizer> parse_pre_tokenizer(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string type, object.string("type"));
  if (type == "Split") return parse_split(object);
  if (type == "ByteLevel") return parse_byte_level(object);
  if (type == "Digits") return parse_digits(object);
  if (type == "Metaspace") return parse_metaspace(object);
  if (type != "Sequence") {
    return object.unsupported("type", concat("pre-tokenizer ", in_quotes(type)));
  }
  SQZ_ASSIGN_OR_RETURN(const auto steps, object.each("pretokenizers", parse_pre_tokenizer));
  return PreTokenizer([steps](std::vector<Piece>& pieces, TextStore& store) -> Status {
    for (const PreTokenizer& step : steps) SQZ_RETURN_IF_ERROR(step(pieces, store));
    return {};
  });
}

}  // namespace sqz
