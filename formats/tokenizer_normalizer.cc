#include "formats/tokenizer_normalizer.h"

#include "formats/tokenizer_regex.h"

namespace sqz {
namespace {

class SequenceNormalizer : public Normalizer {
 public:
  explicit SequenceNormalizer(std::vector<std::unique_ptr<Normalizer>> steps)
      : steps_(std::move(steps)) {}
  Result<std::string> apply(std::string text) const override {
    for (const auto& step : steps_) {
      SQZ_ASSIGN_OR_RETURN(text, step->apply(std::move(text)));
    }
    return text;
  }

 private:
  std::vector<std::unique_ptr<Normalizer>> steps_;
};

class PrependNormalizer : public Normalizer {
 public:
  explicit PrependNormalizer(std::string prefix) : prefix_(std::move(prefix)) {}
  Result<std::string> apply(std::string text) const override {
    if (text.empty()) return text;
    return prefix_ + text;
  }

 private:
  std::string prefix_;
};

class ReplaceNormalizer : public Normalizer {
 public:
  ReplaceNormalizer(Regex pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}
  Result<std::string> apply(std::string text) const override {
    RegexMatcher matcher(pattern_);
    SQZ_RETURN_IF_ERROR(replace_matches(matcher, content_, text));
    return text;
  }

 private:
  Regex pattern_;
  std::string content_;
};

class UnicodeNormalizer : public Normalizer {
 public:
  explicit UnicodeNormalizer(UnicodeForm form) : form_(form) {}
  Result<std::string> apply(std::string text) const override {
    return unicode_normalize(std::move(text), form_);
  }

 private:
  UnicodeForm form_;
};

using Parsed = Result<std::unique_ptr<Normalizer>>;

Parsed parse_object(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string type, object.string("type"));
  if (type == "NFC") return Parsed(std::make_unique<UnicodeNormalizer>(UnicodeForm::kNfc));
  if (type == "NFD") return Parsed(std::make_unique<UnicodeNormalizer>(UnicodeForm::kNfd));
  if (type == "NFKC") return Parsed(std::make_unique<UnicodeNormalizer>(UnicodeForm::kNfkc));
  if (type == "NFKD") return Parsed(std::make_unique<UnicodeNormalizer>(UnicodeForm::kNfkd));
  if (type == "Prepend") {
    SQZ_ASSIGN_OR_RETURN(std::string prefix, object.string("prepend"));
    return Parsed(std::make_unique<PrependNormalizer>(std::move(prefix)));
  }
  if (type == "Replace") {
    SQZ_ASSIGN_OR_RETURN(const std::string pattern, parse_pattern(object));
    SQZ_ASSIGN_OR_RETURN(std::string content, object.string("content"));
    SQZ_ASSIGN_OR_RETURN(
        Regex regex, Regex::compile(pattern, concat(object.file, ": ", object.name_of("pattern"))));
    return Parsed(std::make_unique<ReplaceNormalizer>(std::move(regex), std::move(content)));
  }
  if (type == "Sequence") {
    SQZ_ASSIGN_OR_RETURN(const JsonValue* items, object.array("normalizers"));
    std::vector<std::unique_ptr<Normalizer>> steps;
    for (size_t i = 0; i < items->size(); ++i) {
      SQZ_ASSIGN_OR_RETURN(const JsonObject item, object.element("normalizers", i));
      SQZ_ASSIGN_OR_RETURN(auto step, parse_object(item));
      steps.push_back(std::move(step));
    }
    return Parsed(std::make_unique<SequenceNormalizer>(std::move(steps)));
  }
  return object.unsupported("type", concat("normalizer ", quote_text(type)));
}

}  // namespace

Parsed Normalizer::parse(const JsonObject& owner, std::string_view key) {
  if (!owner.has(key)) return Parsed(nullptr);
  SQZ_ASSIGN_OR_RETURN(const JsonObject object, owner.object(key));
  return parse_object(object);
}

Result<std::string> parse_pattern(const JsonObject& owner) {
  SQZ_ASSIGN_OR_RETURN(const JsonObject pattern, owner.object("pattern"));
  if (pattern.has("Regex")) return pattern.string("Regex");
  SQZ_ASSIGN_OR_RETURN(const std::string literal, pattern.string("String"));
  return escape_pattern(literal);
}

}  // namespace sqz
