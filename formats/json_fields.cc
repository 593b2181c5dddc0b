#include "formats/json_fields.h"

namespace sqz {

Status unexpected(const JsonValue& found, std::string_view label, std::string_view expected) {
  return {Code::kCorrupt, concat(label, ": found ", found_text(found), ", expected ", expected)};
}

Result<JsonDocument> parse_json_object(std::string_view text, std::string_view label) {
  SQZ_ASSIGN_OR_RETURN(JsonDocument json, parse_json(text, label));
  if (json.root().is_object()) return json;
  return unexpected(json.root(), concat(label, ": top level"), "an object");
}

JsonFields::JsonFields(const JsonValue& object, std::string label, std::string prefix)
    : object_(object), label_(std::move(label)), prefix_(std::move(prefix)) {
  if (object.is_object()) return;
  const std::string name = prefix_.substr(0, prefix_.find_last_not_of('.') + 1);
  status_ = unexpected(object, concat(label_, name.empty() ? "" : ": ", name), "an object");
}

JsonFields JsonFields::object(std::string_view key) const {
  static const JsonValue kNull{};
  const JsonValue* field = find(key);
  return JsonFields(field ? *field : kNull, label_, concat(prefix_, key, "."));
}

JsonFields JsonFields::element(std::string_view key, size_t i) const {
  return JsonFields((*find(key))[i], label_, concat(prefix_, key, '[', i, "]."));
}

const JsonValue* JsonFields::find(std::string_view key) const {
  const JsonValue* field = object_.find(key);
  return field == nullptr || field->is_null() ? nullptr : field;
}

void JsonFields::complain_of(std::string_view key, std::string_view found,
                             std::string_view expected, Code code) {
  complain_of({code, bad_field(label_, concat(prefix_, key), found, expected)});
}

void JsonFields::complain(std::string_view key, std::string_view expected, Code code) {
  const JsonValue* field = object_.find(key);
  complain_of(key, field == nullptr ? "nothing" : found_text(*field), expected, code);
}

int64_t JsonFields::integer(std::string_view key, int64_t low, int64_t high,
                            std::optional<int64_t> fallback) {
  const JsonValue* field = find(key);
  if (field == nullptr && fallback) return *fallback;
  if (const auto value = field ? field->integer(low, high) : std::nullopt) return *value;
  complain(key, concat("an integer in [", low, ", ", high, "]"));
  return low;
}

double JsonFields::number(std::string_view key, double low, double high,
                          std::optional<double> fallback) {
  const JsonValue* field = find(key);
  if (field == nullptr && fallback) return *fallback;
  const double value = field ? field->number() : low;
  if (field && field->is_number() && low <= value && value <= high) return value;
  complain(key, concat("a number in [", low, ", ", high, "]"));
  return low;
}

bool JsonFields::boolean(std::string_view key, std::optional<bool> fallback) {
  const JsonValue* field = find(key);
  if (field == nullptr && fallback) return *fallback;
  if (field == nullptr || !field->is_boolean()) complain(key, "true or false");
  return field && field->boolean();
}

std::string JsonFields::text(std::string_view key, std::optional<std::string> fallback) {
  const JsonValue* field = find(key);
  if (field == nullptr && fallback) return *fallback;
  if (field == nullptr || !field->is_string()) complain(key, "a string");
  return std::string(field ? field->string() : "");
}

const JsonValue* JsonFields::value(std::string_view key) {
  const JsonValue* field = find(key);
  if (field == nullptr) complain(key, "a value");
  return field;
}

const JsonValue* JsonFields::array(std::string_view key) {
  const JsonValue* field = find(key);
  if (field && field->is_array()) return field;
  complain(key, "an array");
  return nullptr;
}

std::vector<int64_t> JsonFields::integers(std::string_view key, int64_t low, int64_t high) {
  std::vector<int64_t> out;
  const JsonValue* values = array(key);
  if (values == nullptr) return out;
  for (const JsonValue& value : values->items()) {
    const auto number = value.integer(low, high);
    if (!number) {
      complain_of(concat(key, "[", out.size(), "]"), found_text(value),
                  concat("an integer in [", low, ", ", high, "]"));
    }
    out.push_back(number.value_or(low));
  }
  return out;
}

std::vector<double> JsonFields::numbers(std::string_view key, double low, double high) {
  std::vector<double> out;
  const JsonValue* values = array(key);
  if (values == nullptr) return out;
  for (const JsonValue& value : values->items()) {
    const double number = value.number();
    if (!value.is_number() || !(low <= number && number <= high)) {
      complain_of(concat(key, "[", out.size(), "]"), found_text(value),
                  concat("a number in [", low, ", ", high, "]"));
    }
    out.push_back(number);
  }
  return out;
}

std::optional<JsonDifference> first_difference(const JsonValue* left, const JsonValue* right,
                                               const std::string& name) {
  const auto text = [](const JsonValue* value) {
    return value ? JsonText(*value).str() : std::string("nothing");
  };
  if (text(left) == text(right)) return std::nullopt;
  if (left && right && left->is_object() && right->is_object()) {
    for (const JsonValue* side : {left, right}) {
      for (const JsonValue& member : side->items()) {
        const std::string_view key = member.key();
        const std::string quoted = in_quotes(key);  // as a message may print it
        const std::string inner =
            concat(name, name.empty() ? "" : ".", quoted.substr(1, quoted.size() - 2));
        if (auto found = first_difference(left->find(key), right->find(key), inner)) return found;
      }
    }
  }
  if (left && right && left->is_array() && left->size() == right->size()) {
    for (size_t i = 0; i < left->size(); ++i) {
      const std::string inner = concat(name, '[', i, ']');
      if (auto found = first_difference(&(*left)[i], &(*right)[i], inner)) return found;
    }
  }
  return JsonDifference{name, text(left), text(right)};
}

}  // namespace sqz
