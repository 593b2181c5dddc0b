#include "formats/pretokenizer.h"

#include <algorithm>

#include "formats/tokenizer_normalizer.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr char kGpt2Pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

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

using Parsed = Result<PreTokenizer>;

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
  return object.unsupported("behavior", quote_text(name));
}

Parsed parse_split(const JsonObject& object) {
  SplitRule rule;
  SQZ_ASSIGN_OR_RETURN(rule.pattern, parse_pattern(object));
  SQZ_ASSIGN_OR_RETURN(rule.behavior, parse_behavior(object));
  SQZ_ASSIGN_OR_RETURN(rule.invert, object.boolean("invert", false));
  return splits_by(rule);
}

Parsed parse_byte_level(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const bool add_prefix_space, object.boolean("add_prefix_space", true));
  SQZ_ASSIGN_OR_RETURN(const bool use_regex, object.boolean("use_regex", true));
  std::optional<SplitRule> rule;
  if (use_regex) {
    rule.emplace();
    SQZ_ASSIGN_OR_RETURN(rule->pattern, Regex::compile(kGpt2Pattern, "GPT-2 pattern"));
  }
  return Parsed([add_prefix_space, rule](std::vector<Piece>& pieces, TextStore& store) {
    return split_byte_level(pieces, store, add_prefix_space, rule);
  });
}

Parsed parse_digits(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const bool individual, object.boolean("individual_digits", false));
  SplitRule rule;
  rule.behavior = individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
  SQZ_ASSIGN_OR_RETURN(rule.pattern, Regex::compile("\\p{N}", "Digits pattern"));
  return splits_by(rule);
}

Parsed parse_metaspace(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string replacement, object.string("replacement"));
  if (replacement.empty() || utf8_length(replacement[0]) != replacement.size()) {
    return object.bad("replacement", quote_text(replacement), "one character");
  }
  // Files written before "prepend_scheme" existed have "add_prefix_space".
  SQZ_ASSIGN_OR_RETURN(const bool add_prefix_space, object.boolean("add_prefix_space", true));
  SQZ_ASSIGN_OR_RETURN(const std::string scheme,
                       object.string_or("prepend_scheme", add_prefix_space ? "always" : "never"));
  if (scheme != "first" && scheme != "never" && scheme != "always") {
    return object.bad("prepend_scheme", quote_text(scheme), "\"always\", \"first\" or \"never\"");
  }
  SQZ_ASSIGN_OR_RETURN(const bool split, object.boolean("split", true));
  SplitRule rule;
  rule.behavior = SplitBehavior::kMergedWithNext;
  SQZ_ASSIGN_OR_RETURN(rule.pattern, Regex::compile(escape_pattern(replacement), "Metaspace"));
  return Parsed([=](std::vector<Piece>& pieces, TextStore& store) {
    replace_spaces(pieces, store, replacement, scheme);
    return split ? split_pieces(pieces, rule) : Status();
  });
}

Parsed parse_object(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string type, object.string("type"));
  if (type == "Split") return parse_split(object);
  if (type == "ByteLevel") return parse_byte_level(object);
  if (type == "Digits") return parse_digits(object);
  if (type == "Metaspace") return parse_metaspace(object);
  if (type != "Sequence") {
    return object.unsupported("type", concat("pre-tokenizer ", quote_text(type)));
  }
  SQZ_ASSIGN_OR_RETURN(const auto steps, object.each("pretokenizers", parse_object));
  return Parsed([steps](std::vector<Piece>& pieces, TextStore& store) -> Status {
    for (const PreTokenizer& step : steps) SQZ_RETURN_IF_ERROR(step(pieces, store));
    return {};
  });
}

}  // namespace

Result<PreTokenizer> parse_pre_tokenizer(const JsonObject& owner, std::string_view key) {
  return owner.optional(key, parse_object);
}

}  // namespace sqz
