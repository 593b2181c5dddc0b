#include "formats/config_reader.h"

#include <utility>

namespace sqz {

const Json* ConfigReader::find(std::string_view field) const {
  const auto it = object_.find(field);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

Status ConfigReader::bad(std::string_view field, std::string_view found, std::string_view expected,
                         Code code) const {
  return {code, bad_field(path_, name(field), found, expected)};
}

Result<int64_t> ConfigReader::integer(std::string_view field, int64_t low, int64_t high,
                                      std::optional<int64_t> fallback) const {
  const std::string expected = concat("an integer from ", low, " to ", high);
  const Json* value = find(field);
  if (value == nullptr) {
    if (fallback) return *fallback;
    return missing(field, expected);
  }
  if (!value->is_number_integer()) return bad(field, found_text(*value), expected);
  const bool too_big =
      value->is_number_unsigned() && !std::in_range<int64_t>(value->get<uint64_t>());
  if (too_big || value->get<int64_t>() < low || value->get<int64_t>() > high) {
    return bad(field, found_text(*value), expected);
  }
  return value->get<int64_t>();
}

Result<double> ConfigReader::number(std::string_view field, double low, double high,
                                    std::optional<double> fallback) const {
  const std::string expected = concat("a number from ", low, " to ", high);
  const Json* value = find(field);
  if (value == nullptr) {
    if (fallback) return *fallback;
    return missing(field, expected);
  }
  if (!value->is_number()) return bad(field, found_text(*value), expected);
  const double number = value->get<double>();
  if (!(number >= low && number <= high)) return bad(field, found_text(*value), expected);
  return number;
}

Result<bool> ConfigReader::boolean(std::string_view field, bool fallback) const {
  const Json* value = find(field);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) return bad(field, found_text(*value), "true or false");
  return value->get<bool>();
}

Result<std::string> ConfigReader::text(std::string_view field,
                                       std::optional<std::string> fallback) const {
  const Json* value = find(field);
  if (value == nullptr) {
    if (fallback) return *fallback;
    return missing(field, "a string");
  }
  if (!value->is_string()) return bad(field, found_text(*value), "a string");
  return value->get<std::string>();
}

}  // namespace sqz
