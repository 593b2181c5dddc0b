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

int64_t JsonFields::integer(const char* key, int64_t low, int64_t high) {
  const Json* field = value(key);
  if (!field) return low;
  const bool fits = field->is_number_integer() &&
                    !(field->is_number_unsigned() && field->get<uint64_t>() > INT64_MAX);
  const int64_t number = fits ? field->get<int64_t>() : 0;
  if (fits && low <= number && number <= high) return number;
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
