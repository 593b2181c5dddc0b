#include "formats/pretokenizer.h"

#include <algorithm>

#include "formats/tokenizer_normalizer.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr char kGpt2Pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

Status split_all(std::vector<Piece>& pieces, const SplitRule& rule) {
  Splitter splitter(rule);
  std::vector<Piece> out;
  out.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    if (piece.token >= 0) {
      out.push_back(piece);
    } else {
      SQZ_RETURN_IF_ERROR(splitter.split(piece, out));
    }
  }
  pieces = std::move(out);
  return {};
}

class SequencePreTokenizer : public PreTokenizer {
 public:
  explicit SequencePreTokenizer(std::vector<std::unique_ptr<PreTokenizer>> steps)
      : steps_(std::move(steps)) {}
  Status apply(std::vector<Piece>& pieces, TextStore& store) const override {
    for (const auto& step : steps_) SQZ_RETURN_IF_ERROR(step->apply(pieces, store));
    return {};
  }

 private:
  std::vector<std::unique_ptr<PreTokenizer>> steps_;
};

class SplitPreTokenizer : public PreTokenizer {
 public:
  explicit SplitPreTokenizer(SplitRule rule) : rule_(std::move(rule)) {}
  Status apply(std::vector<Piece>& pieces, TextStore&) const override {
    return split_all(pieces, rule_);
  }

 private:
  SplitRule rule_;
};

class ByteLevelPreTokenizer : public PreTokenizer {
 public:
  ByteLevelPreTokenizer(bool add_prefix_space, std::optional<SplitRule> rule)
      : add_prefix_space_(add_prefix_space), rule_(std::move(rule)) {}

  Status apply(std::vector<Piece>& pieces, TextStore& store) const override {
    if (add_prefix_space_) {
      for (Piece& piece : pieces) {
        if (piece.token >= 0 || piece.text.starts_with(' ')) continue;
        piece.text = store.emplace_back(concat(' ', piece.text));
      }
    }
    if (rule_) SQZ_RETURN_IF_ERROR(split_all(pieces, *rule_));
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

 private:
  bool add_prefix_space_;
  std::optional<SplitRule> rule_;
};

enum class PrependScheme { kAlways, kFirst, kNever };

class MetaspacePreTokenizer : public PreTokenizer {
 public:
  MetaspacePreTokenizer(std::string replacement, PrependScheme scheme,
                        std::optional<SplitRule> rule)
      : replacement_(std::move(replacement)), scheme_(scheme), rule_(std::move(rule)) {}

  Status apply(std::vector<Piece>& pieces, TextStore& store) const override {
    for (Piece& piece : pieces) {
      if (piece.token >= 0) continue;
      std::string& out = store.emplace_back();
      for (char c : piece.text) c == ' ' ? void(out += replacement_) : out.push_back(c);
      const bool wanted =
          scheme_ == PrependScheme::kAlways || (scheme_ == PrependScheme::kFirst && piece.at_start);
      if (wanted && !out.starts_with(replacement_)) out.insert(0, replacement_);
      piece.text = out;
    }
    return rule_ ? split_all(pieces, *rule_) : Status();
  }

 private:
  std::string replacement_;
  PrependScheme scheme_;
  std::optional<SplitRule> rule_;
};

using Parsed = Result<std::unique_ptr<PreTokenizer>>;

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
  SQZ_ASSIGN_OR_RETURN(const std::string pattern, parse_pattern(object));
  SplitRule rule;
  SQZ_ASSIGN_OR_RETURN(rule.behavior, parse_behavior(object));
  SQZ_ASSIGN_OR_RETURN(rule.invert, object.boolean("invert", false));
  SQZ_ASSIGN_OR_RETURN(
      rule.pattern, Regex::compile(pattern, concat(object.file, ": ", object.name_of("pattern"))));
  return Parsed(std::make_unique<SplitPreTokenizer>(std::move(rule)));
}

Parsed parse_byte_level(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const bool add_prefix_space, object.boolean("add_prefix_space", true));
  SQZ_ASSIGN_OR_RETURN(const bool use_regex, object.boolean("use_regex", true));
  std::optional<SplitRule> rule;
  if (use_regex) {
    rule.emplace();
    SQZ_ASSIGN_OR_RETURN(rule->pattern, Regex::compile(kGpt2Pattern, "GPT-2 pattern"));
  }
  return Parsed(std::make_unique<ByteLevelPreTokenizer>(add_prefix_space, std::move(rule)));
}

Parsed parse_digits(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const bool individual, object.boolean("individual_digits", false));
  SplitRule rule;
  rule.behavior = individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
  SQZ_ASSIGN_OR_RETURN(rule.pattern, Regex::compile("\\p{N}", "Digits pattern"));
  return Parsed(std::make_unique<SplitPreTokenizer>(std::move(rule)));
}

Parsed parse_metaspace(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string replacement, object.string("replacement"));
  if (replacement.empty() || utf8_length(replacement[0]) != replacement.size()) {
    return object.bad("replacement", quote_text(replacement), "one character");
  }
  // Files written before "prepend_scheme" existed have "add_prefix_space".
  SQZ_ASSIGN_OR_RETURN(const bool add_prefix_space, object.boolean("add_prefix_space", true));
  SQZ_ASSIGN_OR_RETURN(const std::string name,
                       object.string_or("prepend_scheme", add_prefix_space ? "always" : "never"));
  PrependScheme scheme = PrependScheme::kAlways;
  if (name == "first") {
    scheme = PrependScheme::kFirst;
  } else if (name == "never") {
    scheme = PrependScheme::kNever;
  } else if (name != "always") {
    return object.bad("prepend_scheme", quote_text(name), "\"always\", \"first\" or \"never\"");
  }
  SQZ_ASSIGN_OR_RETURN(const bool split, object.boolean("split", true));
  std::optional<SplitRule> rule;
  if (split) {
    rule.emplace();
    rule->behavior = SplitBehavior::kMergedWithNext;
    SQZ_ASSIGN_OR_RETURN(rule->pattern, Regex::compile(escape_pattern(replacement), "Metaspace"));
  }
  return Parsed(std::make_unique<MetaspacePreTokenizer>(replacement, scheme, std::move(rule)));
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
  SQZ_ASSIGN_OR_RETURN(const JsonValue* items, object.array("pretokenizers"));
  std::vector<std::unique_ptr<PreTokenizer>> steps;
  for (size_t i = 0; i < items->size(); ++i) {
    SQZ_ASSIGN_OR_RETURN(const JsonObject item, object.element("pretokenizers", i));
    SQZ_ASSIGN_OR_RETURN(auto step, parse_object(item));
    steps.push_back(std::move(step));
  }
  return Parsed(std::make_unique<SequencePreTokenizer>(std::move(steps)));
}

}  // namespace

Parsed PreTokenizer::parse(const JsonObject& owner, std::string_view key) {
  if (!owner.has(key)) return Parsed(nullptr);
  SQZ_ASSIGN_OR_RETURN(const JsonObject object, owner.object(key));
  return parse_object(object);
}

}  // namespace sqz
