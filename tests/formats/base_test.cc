// formats/base: checked arithmetic, JSON, element types.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "formats/base/checked.h"
#include "formats/base/dtype.h"
#include "formats/base/json.h"
#include "tests/common/must.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

TEST(Checked, SeesOverflow) {
  EXPECT_FALSE(checked_add<uint64_t>(UINT64_MAX, 1));
  EXPECT_FALSE(checked_mul<int64_t>(int64_t{1} << 32, int64_t{1} << 31));
  EXPECT_EQ(checked_cast<uint32_t>(int64_t{UINT32_MAX}), UINT32_MAX);
  EXPECT_FALSE(checked_cast<uint32_t>(int64_t{-1}));
  EXPECT_EQ(checked_elements(std::vector<int64_t>{3, 4}), 12);
  EXPECT_FALSE(checked_elements(std::vector<int64_t>{3, -1}));
  EXPECT_FALSE(checked_elements(std::vector<int64_t>{INT64_MAX, 2}));
}

std::string json_error(std::string_view text) {
  const auto result = parse_json(text, "x.json");
  return result.ok() ? "" : result.status().message();
}

TEST(Json, ReadsWhatIsLegal) {
  const auto json = must(
      parse_json(R"({"a":[1,-2,3.5,true,null,"é"],"b":{"a":18446744073709551615}})", "x.json"));
  const JsonValue& object = json.root();
  ASSERT_TRUE(object.is_object());
  ASSERT_EQ(object.size(), 2u);
  EXPECT_EQ(object[1].key(), "b");
  ASSERT_EQ(object.find("a")->size(), 6u);
  const auto items = object.find("a")->items();
  EXPECT_EQ(items[0].integer(1, 1), 1);
  EXPECT_EQ(items[1].integer(-2, 0), -2);
  EXPECT_EQ(items[1].integer(-1, 0), std::nullopt);
  EXPECT_EQ(items[1].unsigned_integer(), std::nullopt);
  EXPECT_EQ(items[2].number(), 3.5);
  EXPECT_TRUE(items[3].boolean());
  EXPECT_TRUE(items[4].is_null());
  EXPECT_EQ(items[5].string(), "\xc3\xa9");
  EXPECT_EQ(object.find("b")->find("a")->unsigned_integer(), UINT64_MAX);
  EXPECT_EQ(object.find("b")->find("a")->integer(0, INT64_MAX), std::nullopt);
  EXPECT_EQ(object.find("c"), nullptr);
}

TEST(Json, RefusesWhatIsSilentlyWrongElsewhere) {
  EXPECT_THAT(json_error(R"({"a":1,"b":2,"a":3})"), HasSubstr("duplicate key \"a\""));
  EXPECT_EQ(json_error(R"({"a":{"x":1},"b":{"x":2}})"), "") << "same key, other object";
  EXPECT_THAT(json_error("[18446744073709551616]"), HasSubstr("does not fit in 64 bits"));
  EXPECT_THAT(json_error("[-9223372036854775809]"), HasSubstr("does not fit in 64 bits"));
  EXPECT_THAT(json_error("[1e999]"), HasSubstr("number overflow"));
  EXPECT_THAT(json_error(std::string(65, '[') + std::string(65, ']')), HasSubstr("64 levels"));
  EXPECT_EQ(json_error(std::string(64, '[') + std::string(64, ']')), "");
  EXPECT_EQ(json_error("{} x"),
            "x.json: not valid JSON: byte 4: parse error at line 1, column 4: syntax error while "
            "parsing value - invalid literal; "
            "expected end of input");
  EXPECT_THAT(json_error("[\"\xff\"]"), HasSubstr("UTF-8"));
  EXPECT_NE(json_error(""), "");
  EXPECT_NE(json_error("{\"a\":NaN}"), "");
}

TEST(Json, WritesMembersByKeyAndNumbersThatReadBack) {
  const JsonText inner = {{"b", std::vector{1, -2}}, {"a", nullptr}};
  EXPECT_EQ(inner.str(), R"({"a":null,"b":[1,-2]})");
  JsonMembers members = {{"x", inner}, {"e", std::vector<int>()}, {"o", JsonMembers()}};
  members["t"] = "\"\n\xc3\xa9\xff";
  EXPECT_EQ(JsonText(members).str(),
            "{\"e\":[],\"o\":{},\"t\":\"\\\"\\n\xc3\xa9\xef\xbf\xbd\",\"x\":" + inner.str() + "}");
  const std::vector<double> numbers = {10000, 1e-5, 0.1, 1e300, -0.0, 1e15, 1e16, INFINITY};
  EXPECT_EQ(JsonText(numbers).str(), "[10000.0,1e-05,0.1,1e+300,-0.0,1e+15,1e+16,null]");
  const auto back = must(parse_json(JsonText(members).str(), "x.json"));
  EXPECT_EQ(JsonText(back.root()), JsonText(members));
  EXPECT_EQ(JsonText(parse_json("[18446744073709551615, -5,true,1.50]", "x")->root()).str(),
            "[18446744073709551615,-5,true,1.5]");
}

// IEEE binary16 and bfloat16 are a sign, `exponent_bits` of exponent and the rest of mantissa: the
// value of every bit pattern by that definition, in double.
double by_definition(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double fraction = (bits & ((1 << mantissa_bits) - 1)) / std::exp2(mantissa_bits);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction == 0 ? sign * INFINITY : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1 + fraction, exponent - bias);
}

template <class Half>
void check_all_values(int exponent_bits, Half (*from_float)(float)) {
  for (int i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const double expected = by_definition(bits, exponent_bits);
    const float found = to_float(Half{bits});
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(found)) << "bits " << i;
      ASSERT_TRUE(std::isnan(to_float(from_float(found)))) << "bits " << i;
      continue;
    }
    ASSERT_EQ(static_cast<double>(found), expected) << "bits " << i;
    ASSERT_EQ(std::signbit(found), (bits & 0x8000) != 0) << "bits " << i;
    ASSERT_EQ(from_float(found).bits, bits) << "a value that fits must come back unchanged";
  }
}

TEST(Float16, EveryValueIsExactAndComesBack) {
  check_all_values<Float16>(5, to_float16);
}
TEST(BFloat16, EveryValueIsExactAndComesBack) {
  check_all_values<BFloat16>(8, to_bfloat16);
}

// Between two neighbours: everything below the middle goes down, above goes up, the middle to even.
template <class Half>
void check_rounding(uint16_t largest, Half (*from_float)(float)) {
  for (uint16_t bits = 0; bits < largest; ++bits) {
    const double low = to_float(Half{bits}), high = to_float(Half{uint16_t(bits + 1)});
    const auto middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(static_cast<double>(middle), (low + high) / 2) << "the test itself must not round";
    const uint16_t even = bits & 1 ? static_cast<uint16_t>(bits + 1) : bits;
    ASSERT_EQ(from_float(middle).bits, even) << "bits " << bits;
    ASSERT_EQ(from_float(-middle).bits, even | 0x8000) << "bits " << bits;
    ASSERT_EQ(from_float(std::nextafter(middle, 0.0f)).bits, bits) << "bits " << bits;
    ASSERT_EQ(from_float(std::nextafter(middle, INFINITY)).bits, bits + 1) << "bits " << bits;
  }
}

TEST(Float16, RoundsToNearestEven) {
  check_rounding<Float16>(0x7bff, to_float16);
}
TEST(BFloat16, RoundsToNearestEven) {
  check_rounding<BFloat16>(0x7f7f, to_bfloat16);
}

TEST(Float16, OverflowsToInfinity) {
  EXPECT_EQ(to_float16(65519.996f).bits, 0x7bff) << "below the middle to 2^16";
  EXPECT_EQ(to_float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_float16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
}

}  // namespace
}  // namespace sqz
