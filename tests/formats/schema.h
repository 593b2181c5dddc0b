// Malformed files made from a table of fields: each is left out, and gets values of other types and
// values beyond its range.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "formats/base/status.h"
#include "tests/common/json.h"

namespace sqz::testing {

enum class Type {
  kInteger,  // low .. high
  kNumber,   // low .. high, if they differ
  kBoolean,
  kAny,   // must be there
  kText,  // any
  kWord,  // one of a few; another is `code`
  kHash,
  kArray,
  kRow,  // an array of one value a layer
  kObject,
};

struct Field {
  const char* pointer;  // RFC 6901, into the JSON text
  Type type;
  double low = 0, high = 0;
  bool optional = false;
  Code code = Code::kCorrupt;
};

struct Malformed {
  Json json;
  std::string field;  // named in the message
  Code code = Code::kCorrupt;
};

// The last name in a pointer: "budget" of "/layer_budgets/budget/0".
inline std::string name_of(std::string pointer) {
  while (std::isdigit(static_cast<unsigned char>(pointer.back()))) {
    pointer.resize(pointer.rfind('/'));
  }
  return pointer.substr(pointer.rfind('/') + 1);
}

inline std::vector<Json> wrong_values(const Field& field, const Json& good) {
  const Json number = 2.5, text = "no such", array = Json::array({"no such"}), object = {{"no", 1}};
  const auto integer = [](double x) { return static_cast<int64_t>(x); };
  switch (field.type) {
    case Type::kInteger:
      if (field.high >= 9e18) return {number, text, array, true, integer(field.low) - 1, 1e19};
      return {number, text, array, true, integer(field.low) - 1, integer(field.high) + 1, 1e19};
    case Type::kNumber:
      if (field.low == field.high) return {text, array, true};
      return {text, array, true, field.low - 1, field.high + 1};
    case Type::kBoolean:
      return {number, text, array};
    case Type::kAny:
      return {};
    case Type::kText:
      return {number, array};
    case Type::kWord:
      return {text};
    case Type::kHash:
      return {text, "00000000000000BB", "0000000000000bb"};
    case Type::kArray:
      return {number, text, object};
    case Type::kRow: {
      Json shorter = good, longer = good;
      shorter.erase(shorter.size() - 1);
      longer.push_back(good[0]);
      return {number, object, shorter, longer};
    }
    case Type::kObject:
      return {number, array};
  }
  return {};
}

inline std::vector<Malformed> malformed(const Json& good, std::span<const Field> fields) {
  std::vector<Malformed> out;
  for (const Field& field : fields) {
    const Json::json_pointer at(field.pointer);
    const std::string name = name_of(field.pointer);
    if (!field.optional && good.at(at.parent_pointer()).is_object()) {
      Malformed missing{good, name};
      missing.json.at(at.parent_pointer()).erase(at.back());
      out.push_back(missing);
    }
    for (const Json& value : wrong_values(field, good.value(at, Json()))) {
      Malformed wrong{good, name, field.type == Type::kWord ? field.code : Code::kCorrupt};
      wrong.json[at] = value;
      out.push_back(wrong);
    }
  }
  return out;
}

// `status` is of a reader of `path`: one sentence that names the file and the field.
inline void expect_refused(const Status& status, Code code, const std::string& path,
                           const std::string& field) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_THAT(status.message(), ::testing::HasSubstr(path));
  EXPECT_THAT(status.message(), ::testing::HasSubstr(field));
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << status.message();
}

// read(text) of every malformed file, where `good` is read. The least and the greatest value of an
// integer are not out of its range, whatever else may not fit then.
inline void expect_all_refused(const Json& good, std::span<const Field> fields,
                               const std::string& path,
                               const std::function<Status(const Json&)>& read) {
  ASSERT_TRUE(read(good).ok()) << read(good).message();
  for (const Malformed& wrong : malformed(good, fields)) {
    SCOPED_TRACE(Json::diff(good, wrong.json).dump().substr(0, 200));
    expect_refused(read(wrong.json), wrong.code, path, wrong.field);
  }
  for (const Field& field : fields) {
    if (field.type != Type::kInteger || field.high >= 9e18) continue;
    for (const double limit : {field.low, field.high}) {
      Json json = good;
      json[Json::json_pointer(field.pointer)] = static_cast<int64_t>(limit);
      EXPECT_THAT(read(json).message(),
                  ::testing::Not(::testing::HasSubstr(
                      concat("found ", static_cast<int64_t>(limit), ", expected an integer in ["))))
          << field.pointer;
    }
  }
}

}  // namespace sqz::testing
