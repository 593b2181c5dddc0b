// Fields of a JSON object that came from a file, each range-checked when it is taken. The first
// complaint is kept and the calls after it return harmless values, so that a struct is filled in
// one go and status() is asked once. A field that is null counts as absent, as Hugging Face writes
// it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/json.h"
#include "formats/base/status.h"

namespace sqz {

class JsonFields {
 public:
  // `object` is borrowed. `label` opens every message ("FILE: FIELD OF THE PARENT"), `prefix` the
  // names of fields in it ("rope_scaling.").
  JsonFields(const JsonValue& object, std::string label, std::string prefix = "");

  // The value of any type; a null pointer if the field is absent or null.
  const JsonValue* find(std::string_view key) const;
  bool has(std::string_view key) const { return find(key) != nullptr; }
  // Whether the field is there, null or not: some defaults of Hugging Face tell the two apart.
  bool mentions(std::string_view key) const { return object_.find(key) != nullptr; }
  const std::string& label() const { return label_; }
  const JsonValue& json() const { return object_; }
  // The name of a field of the object, as messages write it.
  std::string name(std::string_view key) const { return prefix_ + std::string(key); }

  // Each returns `fallback` if the field is absent, and complains if there is no fallback.
  // An integer in [low, high].
  int64_t integer(std::string_view key, int64_t low, int64_t high,
                  std::optional<int64_t> fallback = std::nullopt);
  // A finite number in [low, high].
  double number(std::string_view key, double low, double high,
                std::optional<double> fallback = std::nullopt);
  bool boolean(std::string_view key, std::optional<bool> fallback = std::nullopt);
  std::string text(std::string_view key, std::optional<std::string> fallback = std::nullopt);
  // As find(), but complain if the field is absent, or is no array.
  const JsonValue* value(std::string_view key);
  const JsonValue* array(std::string_view key);
  // The object `key` and the i-th item of the array `key`, which must be an object. A complaint
  // goes to the object that is returned.
  JsonFields object(std::string_view key) const;
  JsonFields element(std::string_view key, size_t i) const;
  // Arrays of integers, and of finite numbers, in [low, high].
  std::vector<int64_t> integers(std::string_view key, int64_t low, int64_t high);
  std::vector<double> numbers(std::string_view key, double low, double high);

  // out = from_json(the value of `key`, its label), which is a Result.
  template <class T, class Parse>
  void parse(std::string_view key, T& out, Parse from_json) {
    const JsonValue* field = value(key);
    if (field == nullptr || !status_.ok()) return;
    auto result = from_json(*field, concat(label_, ": ", name(key)));
    complain_of(result.status());
    if (result.ok()) out = *std::move(result);
  }

  // Keep a complaint about `key`, if none is kept yet. complain() reads the value that was found.
  void complain(std::string_view key, std::string_view expected, Code code = Code::kCorrupt);
  void complain_of(std::string_view key, std::string_view found, std::string_view expected,
                   Code code = Code::kCorrupt);

  void complain_of(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  const Status& status() const { return status_; }

 private:
  const JsonValue& object_;
  std::string label_, prefix_;
  Status status_;
};

// parse_json() of a text that must be an object.
Result<JsonDocument> parse_json_object(std::string_view text, std::string_view label);

// kCorrupt "LABEL: found VALUE, expected EXPECTED".
Status unexpected(const JsonValue& found, std::string_view label, std::string_view expected);

// The first leaf in which two values differ, and its text in both: "nothing" if it is absent (or
// the pointer null).
struct JsonDifference {
  std::string name, left, right;  // "rope.theta", "window[2]"
};
std::optional<JsonDifference> first_difference(const JsonValue* left, const JsonValue* right,
                                               const std::string& name = "");

}  // namespace sqz
