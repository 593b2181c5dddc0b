#include "formats/tokenizer_fields.h"

#include <limits>

namespace sqz {
namespace {

constexpr size_t kLongestQuote = 60;

}  // namespace

std::string quote_text(std::string_view text) {
  if (text.size() <= kLongestQuote) return concat('"', text, '"');
  return concat('"', text.substr(0, kLongestQuote), "...\"");
}

std::string describe_json(const JsonValue& value) {
  if (value.is_object()) return "object";
  if (value.is_array()) return "array";
  if (value.is_string()) return concat("string ", quote_text(value.string()));
  const char* type = value.is_number() ? "number " : value.is_boolean() ? "boolean " : "";
  return type + JsonText(value).str();
}

std::string JsonObject::name_of(std::string_view key) const {
  return field.empty() ? std::string(key) : concat(field, '.', key);
}

Status JsonObject::bad(std::string_view key, std::string_view found,
                       std::string_view expected) const {
  return {Code::kCorrupt, bad_field(file, name_of(key), found, expected)};
}

Status JsonObject::unsupported(std::string_view key, std::string_view found) const {
  return {Code::kUnsupported,
          concat(file, ": ", name_of(key), ": ", found, " is not supported by this build")};
}

bool JsonObject::has(std::string_view key) const {
  const JsonValue* found = value.find(key);
  return found != nullptr && !found->is_null();
}

Result<bool> JsonObject::boolean(std::string_view key, bool fallback) const {
  if (!has(key)) return fallback;
  const JsonValue& found = *value.find(key);
  if (!found.is_boolean()) return bad(key, describe_json(found), "a boolean");
  return found.boolean();
}

Result<std::string> JsonObject::string(std::string_view key) const {
  if (!has(key)) return bad(key, "nothing", "a string");
  const JsonValue& found = *value.find(key);
  if (!found.is_string()) return bad(key, describe_json(found), "a string");
  return std::string(found.string());
}

Result<std::string> JsonObject::string_or(std::string_view key, std::string fallback) const {
  if (!has(key)) return fallback;
  return string(key);
}

Result<int32_t> JsonObject::token_id(std::string_view key) const {
  if (!has(key)) return bad(key, "nothing", "a token id");
  return json_token_id(*value.find(key), file, name_of(key));
}

Result<const JsonValue*> JsonObject::array(std::string_view key) const {
  if (!has(key)) return bad(key, "nothing", "an array");
  const JsonValue& found = *value.find(key);
  if (!found.is_array()) return bad(key, describe_json(found), "an array");
  return &found;
}

Result<JsonObject> JsonObject::object(std::string_view key) const {
  if (!has(key)) return bad(key, "nothing", "an object");
  const JsonValue& found = *value.find(key);
  if (!found.is_object()) return bad(key, describe_json(found), "an object");
  return JsonObject{found, file, name_of(key)};
}

Result<JsonObject> JsonObject::element(std::string_view key, size_t i) const {
  SQZ_ASSIGN_OR_RETURN(const JsonValue* items, array(key));
  const std::string name = concat(key, '[', i, ']');
  const JsonValue& found = (*items)[i];
  if (!found.is_object()) return bad(name, describe_json(found), "an object");
  return JsonObject{found, file, name_of(name)};
}

Result<int32_t> json_token_id(const JsonValue& value, std::string_view file,
                              std::string_view field) {
  const auto id = value.integer(0, std::numeric_limits<int32_t>::max());
  if (!id) {
    return Status(Code::kCorrupt, bad_field(file, field, describe_json(value),
                                            "a token id, an integer from 0 to 2147483647"));
  }
  return static_cast<int32_t>(*id);
}

}  // namespace sqz
