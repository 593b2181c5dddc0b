// Typed access to the fields of tokenizer.json, with the project's error messages.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "formats/base/json.h"
#include "formats/base/status.h"

namespace sqz {

// A JSON object with the name under which messages speak of it ("DIR/tokenizer.json", "model").
struct JsonObject {
  const JsonValue& value;
  std::string file;
  std::string field;  // empty for the root

  std::string name_of(std::string_view key) const;
  Status bad(std::string_view key, std::string_view found, std::string_view expected) const;
  Status unsupported(std::string_view key, std::string_view found) const;

  // Null and absent are the same thing in this format.
  const JsonValue* find(std::string_view key) const;
  bool has(std::string_view key) const { return find(key) != nullptr; }
  Result<bool> boolean(std::string_view key, bool fallback) const;
  Result<std::string> string(std::string_view key) const;  // required
  Result<std::string> string_or(std::string_view key, std::string fallback) const;
  Result<int32_t> token_id(std::string_view key) const;        // required
  Result<const JsonValue*> array(std::string_view key) const;  // required
  Result<JsonObject> object(std::string_view key) const;       // required
  // The i-th element of the array `key`, which must be an object.
  Result<JsonObject> element(std::string_view key, size_t i) const;
  // parse(element) of each element of the array `key`, in order.
  template <class T>
  Result<std::vector<T>> each(std::string_view key, Result<T> (*parse)(const JsonObject&)) const {
    std::vector<T> out;
    SQZ_ASSIGN_OR_RETURN(const JsonValue* items, array(key));
    for (size_t i = 0; i < items->size(); ++i) {
      SQZ_ASSIGN_OR_RETURN(const JsonObject item, element(key, i));
      SQZ_ASSIGN_OR_RETURN(T parsed, parse(item));
      out.push_back(std::move(parsed));
    }
    return out;
  }
  // parse(the object `key`), or T() if there is none.
  template <class T>
  Result<T> optional(std::string_view key, Result<T> (*parse)(const JsonObject&)) const {
    if (!has(key)) return T();
    SQZ_ASSIGN_OR_RETURN(const JsonObject found, object(key));
    return parse(found);
  }

  // The field, for which `is_right` must hold.
  Result<const JsonValue*> expect(std::string_view key, bool (JsonValue::*is_right)() const,
                                  const char* expected) const;
};

// `value` as a token id: an integer of [0, 2^31).
Result<int32_t> json_token_id(const JsonValue& value, std::string_view file,
                              std::string_view field);

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
// A map from tokens that can be asked with a string_view.
template <class T>
using TokenMap = std::unordered_map<std::string, T, StringHash, std::equal_to<>>;

}  // namespace sqz
