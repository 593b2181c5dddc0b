#include "formats/tokenizer_fields.h"

#include <limits>

namespace sqz {

std::string JsonObject::name_of(std::string_view key) const {
  return field.empty() ? std::string(key) : concat(field, '.', key);
}

Status JsonObject::bad(std::string_view key, std::string_view found,
                       std::string_view expected) const {
  return Refuse{file}(name_of(key), found, expected);
}

Status JsonObject::unsupported(std::string_view key, std::string_view found) const {
  return {Code::kUnsupported,
          concat(file, ": ", name_of(key), ": ", found, " is not supported by this build")};
}

const JsonValue* JsonObject::find(std::string_view key) const {
  const JsonValue* found = value.find(key);
  return found == nullptr || found->is_null() ? nullptr : found;
}

Result<const JsonValue*> JsonObject::expect(std::string_view key,
                                            bool (JsonValue::*is_right)() const,
                                            const char* expected) const {
  const JsonValue* found = find(key);
  if (found != nullptr && (found->*is_right)()) return found;
  return bad(key, found == nullptr ? "nothing" : found_text(*found), expected);
}

Result<bool> JsonObject::boolean(std::string_view key, bool fallback) const {
  if (!has(key)) return fallback;
  SQZ_ASSIGN_OR_RETURN(const JsonValue* found, expect(key, &JsonValue::is_boolean, "a boolean"));
  return found->boolean();
}

Result<std::string> JsonObject::string(std::string_view key) const {
  SQZ_ASSIGN_OR_RETURN(const JsonValue* found, expect(key, &JsonValue::is_string, "a string"));
  return std::string(found->string());
}

Result<std::string> JsonObject::string_or(std::string_view key, std::string fallback) const {
  return has(key) ? string(key) : fallback;
}

Result<int32_t> JsonObject::token_id(std::string_view key) const {
  const JsonValue* found = find(key);
  return found ? json_token_id(*found, file, name_of(key)) : bad(key, "nothing", "a token id");
}

Result<const JsonValue*> JsonObject::array(std::string_view key) const {
  return expect(key, &JsonValue::is_array, "an array");
}

Result<JsonObject> JsonObject::object(std::string_view key) const {
  SQZ_ASSIGN_OR_RETURN(const JsonValue* found, expect(key, &JsonValue::is_object, "an object"));
  return JsonObject{*found, file, name_of(key)};
}

Result<JsonObject> JsonObject::element(std::string_view key, size_t i) const {
  SQZ_ASSIGN_OR_RETURN(const JsonValue* items, array(key));
  const std::string name = concat(key, '[', i, ']');
  const JsonValue& found = (*items)[i];
  if (!found.is_object()) return bad(name, found_text(found), "an object");
  return JsonObject{found, file, name_of(name)};
}

Result<int32_t> json_token_id(const JsonValue& value, std::string_view file,
                              std::string_view field) {
  const auto id = value.integer(0, std::numeric_limits<int32_t>::max());
  if (id) return static_cast<int32_t>(*id);
  return Refuse{file}(field, found_text(value), "a token id, an integer from 0 to 2147483647");
}

}  // namespace sqz
