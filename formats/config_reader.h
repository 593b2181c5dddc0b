// Reads typed, range-checked fields of a JSON object. Every failure is bad_field(): file, field,
// found, expected. A field that is null counts as absent, as Hugging Face writes it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "formats/base/json.h"
#include "formats/json_fields.h"

namespace sqz {

class ConfigReader {
 public:
  // `prefix` goes before field names in messages ("rope_scaling."). Both references are borrowed.
  ConfigReader(const Json& object, const std::string& path, std::string prefix = "")
      : object_(object), path_(path), prefix_(std::move(prefix)) {}

  // Null if absent or null.
  const Json* find(std::string_view field) const;
  bool has(std::string_view field) const { return find(field) != nullptr; }
  // Present, though possibly null: some defaults of Hugging Face differ between the two.
  bool mentions(std::string_view field) const { return object_.contains(field); }
  std::string name(std::string_view field) const { return prefix_ + std::string(field); }
  const std::string& path() const { return path_; }

  Result<int64_t> integer(std::string_view field, int64_t low, int64_t high,
                          std::optional<int64_t> fallback = std::nullopt) const;
  // Finite and in [low, high]; an integer counts as a number.
  Result<double> number(std::string_view field, double low, double high,
                        std::optional<double> fallback = std::nullopt) const;
  Result<bool> boolean(std::string_view field, bool fallback) const;
  Result<std::string> text(std::string_view field,
                           std::optional<std::string> fallback = std::nullopt) const;

  Status bad(std::string_view field, std::string_view found, std::string_view expected,
             Code code = Code::kCorrupt) const;
  Status missing(std::string_view field, std::string_view expected) const {
    return bad(field, mentions(field) ? "null" : "nothing", expected);
  }

 private:
  const Json& object_;
  const std::string& path_;
  std::string prefix_;
};

}  // namespace sqz
