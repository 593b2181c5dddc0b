#include "formats/tokenizer_steps.h"

namespace sqz {
namespace {

Normalizer unicode(UnicodeForm form) {
  return [form](std::string text) { return unicode_normalize(std::move(text), form); };
}

Result<Normalizer> replace_normalizer(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const Regex pattern, parse_pattern(object));
  SQZ_ASSIGN_OR_RETURN(const std::string content, object.string("content"));
  return Normalizer([pattern, content](std::string text) -> Result<std::string> {
    RegexMatcher matcher(pattern);
    SQZ_RETURN_IF_ERROR(replace_matches(matcher, content, text));
    return text;
  });
}

}  // namespace

Result<Normalizer> parse_normalizer(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string type, object.string("type"));
  if (type == "NFC") return unicode(UnicodeForm::kNfc);
  if (type == "NFD") return unicode(UnicodeForm::kNfd);
  if (type == "NFKC") return unicode(UnicodeForm::kNfkc);
  if (type == "NFKD") return unicode(UnicodeForm::kNfkd);
  if (type == "Replace") return replace_normalizer(object);
  if (type == "Prepend") {
    SQZ_ASSIGN_OR_RETURN(const std::string prefix, object.string("prepend"));
    return Normalizer([prefix](std::string text) { return text.empty() ? text : prefix + text; });
  }
  if (type != "Sequence") {
    return object.unsupported("type", concat("normalizer ", quote_text(type)));
  }
  SQZ_ASSIGN_OR_RETURN(const auto steps, object.each("normalizers", parse_normalizer));
  return Normalizer([steps](std::string text) -> Result<std::string> {
    for (const Normalizer& step : steps) {
      SQZ_ASSIGN_OR_RETURN(text, step(std::move(text)));
    }
    return text;
  });
}

Result<Regex> parse_pattern(const JsonObject& owner) {
  SQZ_ASSIGN_OR_RETURN(const JsonObject pattern, owner.object("pattern"));
  const bool literal = !pattern.has("Regex");
  SQZ_ASSIGN_OR_RETURN(const std::string text, pattern.string(literal ? "String" : "Regex"));
  return Regex::compile(literal ? escape_pattern(text) : text,
                        concat(owner.file, ": ", owner.name_of("pattern")));
}

}  // namespace sqz
