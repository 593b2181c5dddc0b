// Fields of a JSON object that came from a file, each range-checked when it is taken. The first
// complaint is kept and the calls after it return harmless values, so that a struct is filled in
// one go and status() is asked once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "formats/base/json.h"
#include "formats/base/status.h"

namespace sqz {

class JsonFields {
 public:
  // `label` opens every message: "FILE: FIELD OF THE PARENT". Both are borrowed.
  JsonFields(const Json& object, std::string_view label);

  // An integer in [low, high].
  int64_t integer(const char* key, int64_t low, int64_t high);
  // A finite number in [low, high].
  double number(const char* key, double low, double high);
  bool boolean(const char* key);
  std::string text(const char* key);
  // The value whatever its type; null if absent.
  const Json* value(const char* key);
  // An array; null if it is none.
  const Json* array(const char* key);
  // Keeps a complaint of the caller's own about `key`, if none is kept yet.
  void complain(const char* key, std::string_view found, std::string_view expected);

  const Status& status() const { return status_; }

 private:
  const Json& object_;
  std::string_view label_;
  Status status_;
};

// An integer in [low, high], or empty.
std::optional<int64_t> integer_in(const Json& value, int64_t low, int64_t high);

// A JSON value as a message may print it.
std::string found_text(const Json& value);
// The shortest text of a value; invalid UTF-8 becomes U+FFFD (nlohmann's dump() would throw).
std::string json_text(const Json& value);

}  // namespace sqz
