// The safetensors container: what is read, and that everything malformed is refused by name.
#include "formats/safetensors.h"

#include <gtest/gtest.h>

#include "tests/common/must.h"
#include "tests/common/temporary_directory.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/formats/schema.h"

namespace sqz {
namespace {

using testing::little_endian;
using testing::safetensors_bytes;
using testing::Type;

Result<SafetensorsHeader> parse(const std::string& bytes) {
  return parse_safetensors_header(std::as_bytes(std::span(bytes)), bytes.size(), "f.safetensors");
}

const std::string kTwo =
    R"({"__metadata__":{"k":"v"},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[3,11]},)"
    R"("a":{"shape":[3],"data_offsets":[0,3],"dtype":"U8"}})";

TEST(Safetensors, ReadsTensorsByOffsetAndByName) {
  const auto header = must(parse(safetensors_bytes(kTwo, std::string(11, 'x'))));
  EXPECT_EQ(header.metadata.at("k"), "v");
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "a");
  const TensorInfo* b = header.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->dtype, DType::kF32);
  EXPECT_EQ(b->shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(b->offset, 8 + kTwo.size() + 3);
  EXPECT_EQ(b->bytes, 8u);
  EXPECT_EQ(header.find("c"), nullptr);
  EXPECT_EQ(header.find(""), nullptr);
}

TEST(Safetensors, ReadsScalarsEmptyTensorsPaddingAndNoTensors) {
  const auto scalar =
      must(parse(safetensors_bytes(R"({"s":{"dtype":"F16","shape":[],"data_offsets":[0,2]},)"
                                   R"("e":{"dtype":"F64","shape":[0,7],"data_offsets":[2,2]},)"
                                   R"("b":{"dtype":"BOOL","shape":[3],"data_offsets":[2,5]}}    )",
                                   "xxbbb")));
  EXPECT_EQ(scalar.find("e")->bytes, 0u);
  EXPECT_TRUE(parse(safetensors_bytes("{}", "")).ok());
}

TEST(Safetensors, AFileThatShrankIsRefused) {
  testing::TemporaryDirectory dir;
  const std::string bytes = safetensors_bytes(kTwo, std::string(11, 'x'));
  testing::write_file(dir.file("f"), bytes);
  const auto file = must(Env::posix().open_read(dir.file("f")));
  testing::write_file(dir.file("f"), bytes.substr(0, 20));
  EXPECT_EQ(read_safetensors_header(*file).status().code(), Code::kCorrupt);
}

// The description of one tensor "t".
const testing::Field kTensor[] = {{"/t", Type::kObject, 0, 0, true},
                                  {"/t/dtype", Type::kText},
                                  {"/t/dtype", Type::kWord},
                                  {"/t/shape", Type::kArray},
                                  {"/t/shape/0", Type::kInteger, 0, 9e18},
                                  {"/t/data_offsets", Type::kRow},
                                  {"/t/data_offsets/0", Type::kInteger, 0, 9e18},
                                  {"/__metadata__", Type::kObject, 0, 0, true},
                                  {"/__metadata__/k", Type::kText, 0, 0, true}};

TEST(SafetensorsMalformed, FieldsOfATensor) {
  const auto good = Json::parse(R"({"t": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                                    "__metadata__": {"k": "v"}})");
  testing::expect_all_refused(good, kTensor, "f.safetensors", [](const Json& json) {
    return parse(safetensors_bytes(json.dump(), "xx")).status();
  });
}

TEST(SafetensorsMalformed, WhatDoesNotFit) {
  const auto tensor = [](const char* name, const char* dtype, const char* shape,
                         const char* offsets) {
    return concat("\"", name, R"(":{"dtype":")", dtype, R"(","shape":)", shape,
                  R"(,"data_offsets":)", offsets, "}");
  };
  const auto file = [](const std::string& body, size_t bytes) {
    return safetensors_bytes("{" + body + "}", std::string(bytes, 'x'));
  };
  const auto t = [&](const char* dtype, const char* shape, const char* offsets, size_t bytes) {
    return file(tensor("t", dtype, shape, offsets), bytes);
  };
  const auto two = [&](const char* a, const char* b) {
    return file(tensor("a", "U8", "[2]", a) + "," + tensor("b", "U8", "[1]", b), 4);
  };
  for (const auto& [bytes, field] : {
           std::pair(std::string(), "file length"),
           {std::string(7, '\0'), "file length"},
           {little_endian(100'000'001) + "{}", "header length"},
           {little_endian(UINT64_MAX) + "{}", "header length"},
           {little_endian(3) + "{}", "header length"},
           {little_endian(0), "header"},
           {safetensors_bytes("[]", ""), "header"},
           {safetensors_bytes(" {}", ""), "header"},
           {safetensors_bytes("{\"t\":", ""), "byte 6"},
           {safetensors_bytes("{} {}", ""), "byte 4"},
           {safetensors_bytes("{\"\xff\":1}", ""), "header"},
           {file("\"t\":" + std::string(5000, '{'), 0), "header"},
           {file(R"("__metadata__":{},"__metadata__":{})", 0), "__metadata__"},
           {file(R"("__metadata__":{"a":"1","a":"2"})", 0), "\"a\""},
           {file(R"("t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]})", 1),
            "dtype"},
           {file(R"("t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1})", 1), "\"x\""},
           {file(tensor("t", "U8", "[1]", "[0,1]") + "," + tensor("t", "U8", "[1]", "[1,2]"), 2),
            "\"t\""},
           {t("U8", "[4294967296,4294967296]", "[0,0]", 0), "\"t\": shape"},
           {t("F64", "[2305843009213693952]", "[0,0]", 0), "\"t\": shape"},
           {t("U8", "[18446744073709551617]", "[0,1]", 1), "header"},
           {t("U8", "[1]", "[0,18446744073709551616]", 1), "header"},
           {t("U8", "[1]", "[1,0]", 1), "\"t\": data_offsets"},
           {t("U8", "[1]", "[0,2]", 2), "\"t\": data_offsets"},
           {t("F32", "[2]", "[0,4]", 4), "\"t\": data_offsets"},
           {t("U8", "[1]", "[1,2]", 2), "\"t\": data_offsets"},  // a hole
           {two("[0,2]", "[3,4]"), "\"b\": data_offsets"},       // a hole
           {two("[0,2]", "[1,2]"), "\"b\": data_offsets"},       // an overlap
           {two("[0,2]", "[2,3]"), "file length"},               // bytes left over
           {t("U8", "[2]", "[0,2]", 1), "file length"},
           {t("U8", "[9000000000000000000]", "[0,9000000000000000000]", 1), "file length"},
       }) {
    testing::expect_refused(parse(bytes).status(), Code::kCorrupt, "f.safetensors: ", field);
  }
}

TEST(Safetensors, NamesFromTheFileAreMadePrintable) {
  EXPECT_EQ(in_quotes("a\x1b[2J\n"), "\"a\\x1b[2J\\x0a\"");
  const std::string duplicate = "\"\\u001b\xc2\x9b\\n\xc3\xa9\":0";
  EXPECT_THAT(
      parse(safetensors_bytes(concat('{', duplicate, ',', duplicate, '}'), "")).status().message(),
      ::testing::HasSubstr("\"\\x1b\\xc2\\x9b\\x0a\\xc3\\xa9\""));
  EXPECT_EQ(in_quotes(std::string(100, 'n')), "\"" + std::string(80, 'n') + "\"...");
  EXPECT_EQ(shape_text(std::vector<int64_t>{8, 16}), "[8, 16]");
  EXPECT_EQ(shape_text({}), "[]");
}

}  // namespace
}  // namespace sqz
