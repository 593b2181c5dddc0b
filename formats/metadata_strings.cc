#include "formats/metadata_strings.h"

#include "formats/json_fields.h"
#include "formats/safetensors.h"

namespace sqz {

MetadataStrings::MetadataStrings(const std::map<std::string, std::string>& strings,
                                 const std::string& path)
    : strings_(strings), label_(path + ": __metadata__") {}

std::string MetadataStrings::string(const char* key) {
  const auto at = strings_.find(key);
  if (at != strings_.end()) return at->second;
  fail(key, "nothing", "a value");
  return {};
}

bool MetadataStrings::has(const char* key) const {
  return strings_.contains(key);
}

JsonDocument MetadataStrings::json(const char* key) {
  const std::string value = string(key);
  if (!status_.ok()) return {};
  Result<JsonDocument> parsed = parse_json(value, label(key));
  if (parsed.ok()) return *std::move(parsed);
  status_ = parsed.status();
  return {};
}

int64_t MetadataStrings::integer(const char* key, int64_t low, int64_t high) {
  const JsonDocument found = json(key);
  if (const auto value = found.root().integer(low, high)) return *value;
  fail(key, found_text(found.root()), concat("an integer in [", low, ", ", high, "]"));
  return low;
}

double MetadataStrings::number(const char* key, double low, double high) {
  const JsonDocument found = json(key);
  const double value = found.root().number();
  if (found.root().is_number() && low <= value && value <= high) return value;
  fail(key, found_text(found.root()), concat("a number in [", low, ", ", high, "]"));
  return low;
}

bool MetadataStrings::boolean(const char* key) {
  const std::string value = string(key);
  if (status_.ok() && value != "true" && value != "false") {
    fail(key, in_quotes(value), "true or false");
  }
  return value == "true";
}

void MetadataStrings::fail(const char* key, const std::string& found, const std::string& expected) {
  if (status_.ok()) status_ = Refuse{label_}(key, found, expected);
}

std::string MetadataStrings::label(const char* key) const {
  return concat(label_, ": ", key);
}

void check_logits(MetadataStrings& in, const char* remedy) {
  const std::string found = in.has(kLogitsKey) ? in.string(kLogitsKey) : "";
  if (found == kLogitsOfKeys) return;
  in.fail(kLogitsKey, found.empty() ? "nothing" : in_quotes(found),
          concat(in_quotes(kLogitsOfKeys), ": ", remedy));
}

void read_origin(MetadataStrings& in, FileOrigin& origin) {
  origin.producer = in.string("producer");
  origin.tokenizer_hash = in.string("tokenizer_hash");
  in.parse("model", origin.model, model_from_json);
}

bool is_hash(const std::string& text) {
  return text.size() == 16 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

Status check_tokenizer_hash(const Refuse& refuse, const std::string& hash) {
  if (hash.empty() || is_hash(hash)) return {};
  return refuse("tokenizer_hash", in_quotes(hash), "16 hexadecimal digits or none");
}

Status check_range(const Refuse& refuse, const char* field, int64_t value, int64_t low,
                   int64_t high, const char* which) {
  if (low <= value && value <= high) return {};
  return refuse(field, value, concat("an integer in [", low, ", ", high, "]", which));
}

}  // namespace sqz
