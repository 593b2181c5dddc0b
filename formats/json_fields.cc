#include "formats/json_fields.h"

#include "formats/safetensors.h"

namespace sqz {

std::string found_text(const Json& value) {
  if (value.is_string()) return in_quotes(value.get_ref<const std::string&>());
  if (value.is_object()) return "an object";
  if (value.is_array()) return concat("an array of ", value.size());
  return json_text(value);
}

std::string json_text(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::optional<int64_t> integer_in(const Json& value, int64_t low, int64_t high) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX}) {
    return std::nullopt;
  }
  const auto number = value.get<int64_t>();
  return low <= number && number <= high ? std::optional(number) : std::nullopt;
}

JsonFields::JsonFields(const Json& object, std::string_view label)
    : object_(object), label_(label) {
  if (!object.is_object()) {
    status_ = {Code::kCorrupt,
               concat(label, ": found ", found_text(object), ", expected an object")};
  }
}

void JsonFields::complain(const char* key, std::string_view found, std::string_view expected) {
  if (status_.ok()) status_ = {Code::kCorrupt, bad_field(label_, key, found, expected)};
}

const Json* JsonFields::value(const char* key) {
  if (!status_.ok()) return nullptr;
  const auto at = object_.find(key);
  if (at != object_.end()) return &*at;
  complain(key, "nothing", "a value");
  return nullptr;
}

const Json* JsonFields::array(const char* key) {
  const Json* field = value(key);
  if (field == nullptr || field->is_array()) return field;
  complain(key, found_text(*field), "an array");
  return nullptr;
}

int64_t JsonFields::integer(const char* key, int64_t low, int64_t high) {
  const Json* field = value(key);
  if (!field) return low;
  if (const auto number = integer_in(*field, low, high)) return *number;
  complain(key, found_text(*field), concat("an integer in [", low, ", ", high, "]"));
  return low;
}

double JsonFields::number(const char* key, double low, double high) {
  const Json* field = value(key);
  if (!field) return low;
  const double number = field->is_number() ? field->get<double>() : 0.0;
  if (field->is_number() && low <= number && number <= high) return number;
  complain(key, found_text(*field), concat("a number in [", low, ", ", high, "]"));
  return low;
}

bool JsonFields::boolean(const char* key) {
  const Json* field = value(key);
  if (field && field->is_boolean()) return field->get<bool>();
  if (field) complain(key, found_text(*field), "true or false");
  return false;
}

std::string JsonFields::text(const char* key) {
  const Json* field = value(key);
  if (field && field->is_string()) return field->get<std::string>();
  if (field) complain(key, found_text(*field), "a string");
  return {};
}

}  // namespace sqz
