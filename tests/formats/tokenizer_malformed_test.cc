// Bad tokenizer files: each is refused with a message that names the file, the field, what was
// found and what was expected.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/tokenizer.h"
#include "tests/formats/schema.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

constexpr char kGood[] = R"({
  "version": "1.0",
  "added_tokens": [{"id": 5, "content": "<s>", "special": true}],
  "normalizer": {"type": "NFC"},
  "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated"},
  "post_processor": {"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
    "special_tokens": {"<s>": {"ids": [5]}}},
  "decoder": {"type": "Fuse"},
  "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
})";

using testing::Field;
using testing::Type;

const Field kFields[] = {
    {"/version", Type::kWord, 0, 0, true, Code::kUnsupported},
    {"/added_tokens", Type::kArray, 0, 0, true},
    {"/added_tokens/0", Type::kObject},
    {"/added_tokens/0/id", Type::kInteger, 0, 2147483647},
    {"/added_tokens/0/content", Type::kText},
    {"/added_tokens/0/special", Type::kBoolean, 0, 0, true},
    {"/added_tokens/0/lstrip", Type::kBoolean, 0, 0, true},
    {"/normalizer", Type::kObject, 0, 0, true},
    {"/normalizer/type", Type::kText},
    {"/normalizer/type", Type::kWord, 0, 0, false, Code::kUnsupported},
    {"/pre_tokenizer", Type::kObject, 0, 0, true},
    {"/pre_tokenizer/type", Type::kWord, 0, 0, false, Code::kUnsupported},
    {"/pre_tokenizer/pattern", Type::kObject},
    {"/pre_tokenizer/behavior", Type::kText},
    {"/pre_tokenizer/behavior", Type::kWord, 0, 0, false, Code::kUnsupported},
    {"/post_processor", Type::kObject, 0, 0, true},
    {"/post_processor/type", Type::kWord, 0, 0, false, Code::kUnsupported},
    {"/post_processor/single", Type::kArray},
    {"/decoder", Type::kObject, 0, 0, true},
    {"/decoder/type", Type::kWord, 0, 0, false, Code::kUnsupported},
    {"/model", Type::kObject},
    {"/model/type", Type::kText, 0, 0, true},
    {"/model/type", Type::kWord, 0, 0, true, Code::kUnsupported},
    {"/model/vocab", Type::kObject},
    {"/model/vocab/b", Type::kInteger, 0, 2147483647, true},
    {"/model/merges", Type::kArray},
    {"/model/byte_fallback", Type::kBoolean, 0, 0, true},
    {"/model/dropout", Type::kNumber, 0, 0, true},
};

// A value that is put somewhere in kGood; "" removes the field.
struct Refused {
  const char* pointer;
  const char* value;
  const char* field;
  Code code = Code::kCorrupt;
};

// As JSON: longer than any token may be.
const std::string kLongToken = "\"" + std::string(1025, 'x') + "\"";
// 300 letters of 3 bytes, which NFC makes two of 3 bytes each.
const std::string kGrowingToken = [] {
  std::string content;
  for (int i = 0; i < 300; ++i) content += "\u0958";
  return concat(R"({"id": 5, "normalized": true, "content": ")", content, "\"}");
}();

const Refused kRefused[] = {
    {"/model/vocab", "{}", "model.vocab"},
    {"/model/vocab/b", "0", "model.vocab[\"b\"]"},
    {"/model/merges/0", "[\"x\",\"b\"]", "model.merges[0]: found \"x\""},
    {"/model/merges/0", "\"a b a\"", "model.merges[0]"},
    {"/model/merges/0", "\"ab\"", "model.merges[0]"},
    {"/model/merges/0", "7", "model.merges[0]"},
    {"/model/merges/0", "[\"a\",\"b\",\"a\"]", "model.merges[0]"},
    {"/model/merges/0", "\"b x\"", "found \"x\""},
    {"/model/merges/0", "\"b a\"", "found \"ba\""},
    {"/model/unk_token", "\"<unk>\"", "model.unk_token"},
    {"/model/dropout", "0.1", "model.dropout", Code::kUnsupported},
    {"/model/continuing_subword_prefix", "\"##\"", "continuing_subword_prefix", Code::kUnsupported},
    {"/added_tokens/0/content", kLongToken.c_str(), "added_tokens[0].content"},
    {"/added_tokens/0", kGrowingToken.c_str(), "added_tokens[0].content"},
    {"/added_tokens/0/content", "\"\"", "added_tokens[0].content"},
    {"/added_tokens/0/content", "\"ab\"", "added_tokens[0].id"},
    {"/added_tokens/0/id", "1", "added_tokens[0].id"},
    {"/added_tokens/0/lstrip", "true", "added_tokens[0].lstrip", Code::kUnsupported},
    {"/normalizer", R"({"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"})",
     "normalizer.pattern.Regex", Code::kUnsupported},
    {"/pre_tokenizer/pattern", "{}", "pattern.String"},
    {"/pre_tokenizer/pattern/Regex", "\"(a\"", "pre_tokenizer.pattern"},
    {"/pre_tokenizer/pattern/Regex", "\"a{1,3}+\"", "pattern", Code::kUnsupported},
    {"/pre_tokenizer/pattern/Regex", "\"a\\\\b\"", "pattern", Code::kUnsupported},
    {"/pre_tokenizer/pattern/Regex", "\"[a[bc]]\"", "pattern", Code::kUnsupported},
    {"/pre_tokenizer/pattern/Regex", "\"\\\\C\"", "pattern", Code::kUnsupported},
    {"/pre_tokenizer", R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, 3]})",
     "pre_tokenizer.pretokenizers[1]"},
    {"/pre_tokenizer", R"({"type": "Metaspace", "replacement": "ab"})",
     "pre_tokenizer.replacement"},
    {"/decoder", R"({"type": "Strip", "content": " ", "start": -1, "stop": 0})", "decoder.start"},
    {"/decoder", R"({"type": "Strip", "content": " ", "start": 0, "stop": 1})", "decoder.stop"},
    {"/post_processor/single", "[]", "post_processor.single"},
    {"/post_processor/special_tokens", "{}", "post_processor.special_tokens.<s>"},
    {"/post_processor/special_tokens/<s>/ids/0", "77", "post_processor.special_tokens"},
};

Status load(const Json& file) {
  return Tokenizer::parse(file.dump(), "tokenizer.json").status();
}

std::vector<int32_t> ids_of(const Json& file, const std::string& text) {
  std::vector<int32_t> ids;
  const auto tokenizer = Tokenizer::parse(file.dump(), "tokenizer.json");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_TRUE((*tokenizer)->encode(text, true, ids).ok());
  return ids;
}

Json good() {
  return Json::parse(kGood);
}

TEST(MalformedFile, IsRefusedByName) {
  testing::expect_all_refused(good(), kFields, "tokenizer.json", load);
  for (const Refused& refused : kRefused) {
    SCOPED_TRACE(concat(refused.pointer, " = ", std::string(refused.value).substr(0, 80)));
    Json json = good();
    json[Json::json_pointer(refused.pointer)] = Json::parse(refused.value);
    testing::expect_refused(load(json), refused.code, "tokenizer.json", refused.field);
  }
}

TEST(ByteFallback, TheTokenOfAByteMayBeTheFirst) {
  Json json = good();
  json["model"] = Json::parse(
      R"({"type": "BPE", "byte_fallback": true, "vocab": {"<0x00>": 0, "a": 1}, "merges": []})");
  EXPECT_EQ(ids_of(json, std::string("a\0", 2)), (std::vector<int32_t>{5, 1, 0}));
}

// Whatever a flipped bit makes of the file, it loads or is refused; the sanitizers watch.
TEST(MalformedFile, EveryFlippedBitIsHandled) {
  size_t refused = 0;
  for (size_t byte = 0; byte < sizeof(kGood) - 1; ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string text = kGood;
      text[byte] = static_cast<char>(text[byte] ^ (1 << bit));
      const Status status = Tokenizer::parse(text, "tokenizer.json").status();
      refused += status.ok() ? 0 : 1;
      EXPECT_TRUE(status.ok() || !status.message().empty());
    }
  }
  EXPECT_GT(refused, sizeof(kGood));
}

TEST(MalformedFile, NestedSequencesStopAtTheDepthOfTheParser) {
  Json step = {{"type", "NFC"}};
  for (int i = 0; i < 25; ++i) step = {{"type", "Sequence"}, {"normalizers", {step}}};
  Json file = good();
  file["normalizer"] = step;
  EXPECT_TRUE(load(file).ok());
  for (int i = 0; i < 25; ++i) step = {{"type", "Sequence"}, {"normalizers", {step}}};
  file["normalizer"] = step;
  EXPECT_THAT(load(file).message(), HasSubstr("nested deeper"));
}

TEST(MalformedFile, FarIdsCostNothing) {
  Json file = good();
  file["model"]["vocab"]["ab"] = 2147483647;
  EXPECT_EQ(ids_of(file, "ab"), (std::vector<int32_t>{5, 2147483647}));
}

TEST(MalformedFile, NulInTokensIsAByteLikeOthers) {
  Json file = good();
  file["model"]["vocab"][std::string("\0", 1)] = 9;
  EXPECT_EQ(ids_of(file, std::string("a\0b", 3)), (std::vector<int32_t>{5, 0, 9, 1}));
}

}  // namespace
}  // namespace sqz
