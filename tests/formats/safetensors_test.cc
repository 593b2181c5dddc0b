// The safetensors container: what is read, and that everything malformed is refused by name.
#include "formats/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/temporary_directory.h"
#include "tests/formats/fault_env.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::little_endian;
using testing::safetensors_bytes;

Result<SafetensorsHeader> parse(const std::string& bytes) {
  return parse_safetensors_header(std::as_bytes(std::span(bytes)), bytes.size(), "f.safetensors");
}

const std::string kTwo =
    R"({"__metadata__":{"k":"v"},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[3,11]},)"
    R"("a":{"shape":[3],"data_offsets":[0,3],"dtype":"U8"}})";

TEST(Safetensors, ReadsTensorsByOffsetAndByName) {
  const auto header = parse(safetensors_bytes(kTwo, std::string(11, 'x')));
  ASSERT_TRUE(header.ok()) << header.status().message();
  EXPECT_EQ(header->metadata.at("k"), "v");
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0].name, "a");
  const TensorInfo* b = header->find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->dtype, DType::kF32);
  EXPECT_EQ(b->shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(b->offset, 8 + kTwo.size() + 3);
  EXPECT_EQ(b->bytes, 8u);
  EXPECT_EQ(header->find("c"), nullptr);
  EXPECT_EQ(header->find(""), nullptr);
}

TEST(Safetensors, ReadsScalarsEmptyTensorsPaddingAndNoTensors) {
  const auto scalar =
      parse(safetensors_bytes(R"({"s":{"dtype":"F16","shape":[],"data_offsets":[0,2]},)"
                              R"("e":{"dtype":"F64","shape":[0,7],"data_offsets":[2,2]}}    )",
                              "xx"));
  ASSERT_TRUE(scalar.ok()) << scalar.status().message();
  EXPECT_EQ(scalar->find("e")->bytes, 0u);
  EXPECT_TRUE(parse(safetensors_bytes("{}", "")).ok());
}

TEST(Safetensors, ReadsFromAFile) {
  testing::TemporaryDirectory dir;
  testing::write_file(dir.file("f"), safetensors_bytes(kTwo, std::string(11, 'x')));
  const auto file = Env::posix().open_read(dir.file("f"));
  ASSERT_TRUE(file.ok());
  const auto header = read_safetensors_header(**file);
  ASSERT_TRUE(header.ok()) << header.status().message();
  EXPECT_EQ(header->tensors.size(), 2u);
}

TEST(Safetensors, AFailedReadIsPassedOn) {
  testing::TemporaryDirectory dir;
  testing::write_file(dir.file("f"), safetensors_bytes(kTwo, std::string(11, 'x')));
  for (int nth : {1, 2}) {  // 0 opens
    testing::FailNth fail;
    fail.fail_at = nth;
    testing::FaultEnv env(fail.hook());
    const auto file = env.open_read(dir.file("f"));
    ASSERT_TRUE(file.ok());
    EXPECT_EQ(read_safetensors_header(**file).status().code(), Code::kIo);
  }
}

TEST(Safetensors, AFileThatShrankIsRefused) {
  testing::TemporaryDirectory dir;
  const std::string bytes = safetensors_bytes(kTwo, std::string(11, 'x'));
  testing::write_file(dir.file("f"), bytes);
  const auto file = Env::posix().open_read(dir.file("f"));
  ASSERT_TRUE(file.ok());
  testing::write_file(dir.file("f"), bytes.substr(0, 20));
  EXPECT_EQ(read_safetensors_header(**file).status().code(), Code::kCorrupt);
}

struct Malformed {
  const char* name;
  std::string bytes;
  std::vector<std::string> says;  // all of these
};

// A file with one tensor "t" whose description is `body`, and `data` bytes.
Malformed tensor(const char* name, const std::string& body, size_t data,
                 std::vector<std::string> says) {
  return {name, safetensors_bytes("{\"t\":{" + body + "}}", std::string(data, 'x')),
          std::move(says)};
}
Malformed header(const char* name, const std::string& text, std::vector<std::string> says) {
  return {name, safetensors_bytes(text, ""), std::move(says)};
}

std::vector<Malformed> malformed_files() {
  const std::string u8 = R"("dtype":"U8",)";
  const auto entry = [](const std::string& name, int begin, int end) {
    return "\"" + name + R"(":{"dtype":"U8","shape":[)" + std::to_string(end - begin) +
           R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  };
  return {
      {"Empty", "", {"file length", "0 bytes", "8 at least"}},
      {"SevenBytes", std::string(7, '\0'), {"file length", "7 bytes"}},
      {"LengthBeyondLimit",
       little_endian(100'000'001) + "{}",
       {"header length", "100000001", "at most 100000000"}},
      {"LengthWraps", little_endian(UINT64_MAX) + "{}", {"header length", "18446744073709551615"}},
      {"LengthBeyondFile", little_endian(3) + "{}", {"header length", "found 3", "at most 2"}},
      {"NoHeader", little_endian(0), {"header", "nothing", "JSON object"}},
      header("NotAnObject", "[]", {"header", "JSON object"}),
      header("LeadingSpace", " {}", {"header", "\" {}\""}),
      header("CutJson", "{\"t\":", {"not valid JSON: byte 6"}),
      header("TextAfterJson", "{} {}", {"not valid JSON: byte 4"}),
      header("InvalidUtf8", "{\"\xff\":1}", {"not valid JSON", "UTF-8"}),
      header("TensorIsNumber", R"({"t":1})", {"\"t\"", "found 1", "an object"}),
      header("TensorIsArray", R"({"t":[]})", {"\"t\"", "an array", "an object"}),
      header("MetadataIsString", R"({"__metadata__":"x"})", {"__metadata__", "an object"}),
      header("MetadataValueIsNumber", R"({"__metadata__":{"a":1}})",
             {"__metadata__", "\"a\"", "found 1", "a string"}),
      header("MetadataValueIsObject", R"({"__metadata__":{"a":{}}})", {"\"a\"", "a string"}),
      header("MetadataTwice", R"({"__metadata__":{},"__metadata__":{}})", {"twice"}),
      header("MetadataKeyTwice", R"({"__metadata__":{"a":"1","a":"2"}})", {"\"a\"", "twice"}),
      {"NameTwice",
       safetensors_bytes("{" + entry("t", 0, 1) + "," + entry("t", 1, 2) + "}", "xx"),
       {"tensor \"t\"", "twice"}},
      tensor("FieldTwice", u8 + R"("dtype":"U8","shape":[1],"data_offsets":[0,1])", 1,
             {"tensor \"t\": dtype", "twice"}),
      tensor("UnknownField", u8 + R"("shape":[1],"data_offsets":[0,1],"x":1)", 1, {"\"x\""}),
      tensor("NoDType", R"("shape":[1],"data_offsets":[0,1])", 1, {"no dtype"}),
      tensor("NoShape", u8 + R"("data_offsets":[0,1])", 1, {"no shape"}),
      tensor("NoOffsets", u8 + R"("shape":[1])", 1, {"no data_offsets"}),
      tensor("UnknownDType", R"("dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1])", 1,
             {"tensor \"t\": dtype", "\"F8_E4M3\"", "BF16"}),
      tensor("DTypeIsNumber", R"("dtype":7,"shape":[1],"data_offsets":[0,1])", 1,
             {"tensor \"t\": dtype", "found 7"}),
      tensor("DTypeIsNull", R"("dtype":null,"shape":[1],"data_offsets":[0,1])", 1, {"found null"}),
      tensor("ShapeIsNumber", u8 + R"("shape":1,"data_offsets":[0,1])", 1,
             {"tensor \"t\": shape", "found 1", "an array"}),
      tensor("ShapeIsNested", u8 + R"("shape":[[1]],"data_offsets":[0,1])", 1, {"shape", "array"}),
      tensor("NegativeShape", u8 + R"("shape":[-1],"data_offsets":[0,1])", 1, {"shape", "-1"}),
      tensor("FractionalShape", u8 + R"("shape":[1.0],"data_offsets":[0,1])", 1, {"shape", "1.0"}),
      tensor("BooleanShape", u8 + R"("shape":[true],"data_offsets":[0,1])", 1, {"shape", "true"}),
      tensor("ShapeBeyondInt64", u8 + R"("shape":[9223372036854775808],"data_offsets":[0,1])", 1,
             {"shape", "9223372036854775808"}),
      tensor("ShapeBeyond64Bits", u8 + R"("shape":[18446744073709551617],"data_offsets":[0,1])", 1,
             {"shape", "18446744073709551617"}),
      tensor("ShapeOverflows", u8 + R"("shape":[4294967296,4294967296],"data_offsets":[0,0])", 0,
             {"shape", "[4294967296, 4294967296]", "2^63"}),
      tensor("BytesOverflow", R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])",
             0, {"shape", "2^63"}),
      tensor("OneOffset", u8 + R"("shape":[1],"data_offsets":[0])", 1, {"data_offsets", "two"}),
      tensor("ThreeOffsets", u8 + R"("shape":[1],"data_offsets":[0,1,2])", 1,
             {"data_offsets", "found 2"}),
      tensor("NegativeOffset", u8 + R"("shape":[1],"data_offsets":[-1,0])", 1,
             {"data_offsets", "-1"}),
      tensor("OffsetBeyond64Bits", u8 + R"("shape":[1],"data_offsets":[0,18446744073709551616])", 1,
             {"data_offsets", "18446744073709551616"}),
      tensor("OffsetsReversed", u8 + R"("shape":[1],"data_offsets":[1,0])", 1,
             {"data_offsets", "[1, 0]", "begin <= end"}),
      tensor("RangeTooLong", u8 + R"("shape":[1],"data_offsets":[0,2])", 2,
             {"data_offsets", "2 bytes", "1 for U8[1]"}),
      tensor("RangeTooShort", R"("dtype":"F32","shape":[2],"data_offsets":[0,4])", 4,
             {"4 bytes", "8 for F32[2]"}),
      {"Hole",
       safetensors_bytes("{" + entry("a", 0, 1) + "," + entry("b", 2, 3) + "}", "xxx"),
       {"tensor \"b\"", "hole", "expected 1"}},
      {"HoleAtStart", safetensors_bytes("{" + entry("a", 1, 2) + "}", "xx"), {"hole"}},
      {"Overlap",
       safetensors_bytes("{" + entry("a", 0, 2) + "," + entry("b", 1, 3) + "}", "xxx"),
       {"tensor \"b\"", "overlap"}},
      {"SameRange",
       safetensors_bytes("{" + entry("a", 0, 2) + "," + entry("b", 0, 2) + "}", "xx"),
       {"overlap"}},
      {"PastTheEnd", safetensors_bytes("{" + entry("a", 0, 2) + "}", "x"), {"file length"}},
      {"FarPastTheEnd",
       safetensors_bytes(R"({"a":{"dtype":"U8","shape":[9000000000000000000],)"
                         R"("data_offsets":[0,9000000000000000000]}})",
                         "x"),
       {"file length", "9000000000000000000"}},
      {"BytesLeftOver", safetensors_bytes("{" + entry("a", 0, 2) + "}", "xxx"), {"file length"}},
      header("DeepNesting", "{\"t\":" + std::string(5000, '{'), {"header"}),
  };
}

class SafetensorsMalformed : public ::testing::TestWithParam<Malformed> {};

TEST_P(SafetensorsMalformed, IsRefusedByName) {
  const auto result = parse(GetParam().bytes);
  ASSERT_FALSE(result.ok());
  const std::string message = result.status().message();
  EXPECT_EQ(result.status().code(), Code::kCorrupt);
  EXPECT_THAT(message, ::testing::StartsWith("f.safetensors: "));
  for (const std::string& part : GetParam().says) EXPECT_THAT(message, HasSubstr(part));
  EXPECT_EQ(message.find('\n'), std::string::npos) << "one sentence";
}

INSTANTIATE_TEST_SUITE_P(All, SafetensorsMalformed, ::testing::ValuesIn(malformed_files()),
                         [](const auto& test) { return test.param.name; });

TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string whole = safetensors_bytes(kTwo, std::string(11, 'x'));
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(parse(whole.substr(0, length)).ok()) << length;
  }
}

TEST(Safetensors, NamesFromTheFileAreMadePrintable) {
  EXPECT_EQ(in_quotes("a\x1b[2J\n"), "\"a\\x1b[2J\\x0a\"");
  EXPECT_EQ(in_quotes(std::string(100, 'n')), "\"" + std::string(80, 'n') + "\"...");
  EXPECT_EQ(shape_text(std::vector<int64_t>{8, 16}), "[8, 16]");
  EXPECT_EQ(shape_text({}), "[]");
}

}  // namespace
}  // namespace sqz
