// JSON from files that nobody vouches for, and JSON text to write. No tree of values is built on
// either way: a document is two flat arrays, what is written is a string. Both can run out of
// memory with std::bad_alloc, and destroying them needs none.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/base/status.h"

namespace sqz {

// A value of a JsonDocument, which must outlive it. A getter of another type than the value's gives
// false, 0, "" or nothing.
class JsonValue {
 public:
  JsonValue() = default;  // null
  explicit JsonValue(bool value) : kind_(Kind::kBoolean), boolean_(value) {}
  explicit JsonValue(int64_t value) : kind_(Kind::kInteger), integer_(value) {}
  explicit JsonValue(uint64_t value) : kind_(Kind::kUnsigned), unsigned_(value) {}
  explicit JsonValue(double value) : kind_(Kind::kNumber), number_(value) {}
  explicit JsonValue(std::string_view text)  // borrowed
      : kind_(Kind::kString), text_(text.data()), size_(text.size()) {}

  bool is_null() const { return kind_ == Kind::kNull; }
  bool is_boolean() const { return kind_ == Kind::kBoolean; }
  bool is_integer() const { return kind_ == Kind::kInteger || kind_ == Kind::kUnsigned; }
  bool is_number() const { return is_integer() || kind_ == Kind::kNumber; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_array() const { return kind_ == Kind::kArray; }
  bool is_object() const { return kind_ == Kind::kObject; }

  bool boolean() const { return is_boolean() && boolean_; }
  double number() const;
  std::string_view string() const { return is_string() ? std::string_view(text_, size_) : ""; }
  // An integer in [low, high], or none.
  std::optional<int64_t> integer(int64_t low, int64_t high) const;
  // An integer from 0 on, or none.
  std::optional<uint64_t> unsigned_integer() const;

  // The items of an array, or the members of an object in the order of their keys.
  std::span<const JsonValue> items() const;
  size_t size() const { return items().size(); }
  const JsonValue& operator[](size_t i) const { return first_[i]; }
  // The member of an object with this key, or null.
  const JsonValue* find(std::string_view key) const;
  // The key of a member of an object.
  std::string_view key() const { return key_; }

 private:
  friend class JsonBuilder;
  enum class Kind : uint8_t {
    kNull,
    kBoolean,
    kInteger,
    kUnsigned,
    kNumber,
    kString,
    kArray,
    kObject
  };

  Kind kind_ = Kind::kNull;
  union {
    bool boolean_;
    int64_t integer_;
    uint64_t unsigned_ = 0;
    double number_;
    const char* text_;
    const JsonValue* first_;  // of the items
    size_t begin_;            // their place, while more values are read
  };
  size_t size_ = 0;  // bytes of text_, or items
  std::string_view key_;
};

class JsonDocument {
 public:
  JsonDocument() = default;  // null
  JsonDocument(JsonDocument&&) = default;
  JsonDocument& operator=(JsonDocument&&) = default;

  const JsonValue& root() const { return root_; }

 private:
  friend class JsonBuilder;
  JsonValue root_;
  std::vector<JsonValue> values_;  // the items of each array and object are neighbours
  std::vector<char> text_;         // of all keys and strings
};

// `label` names the source in messages ("config.json", or "FILE header"). Errors are kCorrupt and
// say at which byte. Refused: duplicate keys in one object, integers outside [-2^63, 2^64), numbers
// that overflow a double, more than 64 levels of nesting, text after the value, invalid UTF-8.
Result<JsonDocument> parse_json(std::string_view text, std::string_view label);

// A value as JSON text without spaces: members in the order of their keys, numbers as the shortest
// text that reads back, U+FFFD for invalid UTF-8. Equal values have equal text. Values convert
// implicitly, so that an object is written as
// JsonText({{"name", "x"}, {"shape", std::vector{1, 2}}, {"inner", {{"yes", true}}}}).
class JsonText {
 public:
  JsonText() : text_("null") {}
  JsonText(std::nullptr_t) : JsonText() {}
  JsonText(bool value) : text_(value ? "true" : "false") {}
  JsonText(std::integral auto value) : text_(std::to_string(value)) {}
  JsonText(double value);  // "null" if it is not finite
  JsonText(std::string_view value);
  JsonText(const std::string& value) : JsonText(std::string_view(value)) {}
  JsonText(const char* value) : JsonText(std::string_view(value)) {}
  template <class T>
  JsonText(const std::vector<T>& items);
  template <class T>
  JsonText(const std::map<std::string, T>& members);
  JsonText(std::initializer_list<std::pair<const std::string, JsonText>> members);
  explicit JsonText(const JsonValue& value);

  bool is_null() const { return text_ == "null"; }
  const std::string& str() const { return text_; }
  // The document of this text; null if it has more levels than parse_json() takes.
  JsonDocument parsed() const;
  bool operator==(const JsonText&) const = default;

 private:
  void add(const JsonText& item);
  void add(std::string_view key, const JsonText& value);

  std::string text_;
};

// An object to which members are still added.
using JsonMembers = std::map<std::string, JsonText>;

template <class T>
JsonText::JsonText(const std::vector<T>& items) : text_("[") {
  for (const T& item : items) add(item);
  text_ += ']';
}

template <class T>
JsonText::JsonText(const std::map<std::string, T>& members) : text_("{") {
  for (const auto& [key, value] : members) add(key, value);
  text_ += '}';
}

// A JSON value as a message may print it.
std::string found_text(const JsonValue& value);

}  // namespace sqz
