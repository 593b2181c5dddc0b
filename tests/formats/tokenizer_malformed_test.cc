// Bad tokenizer files: each is refused with a message that names the file, the field, what was
// found and what was expected.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "formats/tokenizer.h"
#include "tests/common/json.h"
#include "tests/common/temporary_directory.h"
#include "tests/formats/tokenizer_golden.h"

namespace sqz {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::TemporaryDirectory;

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

struct Malformed {
  const char* name;
  const char* pointer;  // RFC 6901, into kGood
  const char* value;    // what is put there; "" removes the field
  Code code;
  const char* message;
};

// As JSON: longer than any token may be.
const std::string kLongToken = "\"" + std::string(1025, 'x') + "\"";
// 300 letters of 3 bytes, which NFC makes two of 3 bytes each.
const std::string kGrowingToken = [] {
  std::string content;
  for (int i = 0; i < 300; ++i) content += "\u0958";
  return concat(R"({"id": 5, "normalized": true, "content": ")", content, "\"}");
}();

const Malformed kMalformed[] = {
    {"model_missing", "/model", "", Code::kCorrupt, "model: found nothing, expected an object"},
    {"model_not_object", "/model", "[]", Code::kCorrupt, "model: found array"},
    {"model_type", "/model/type", "\"Unigram\"", Code::kUnsupported, "model \"Unigram\""},
    {"model_type_number", "/model/type", "3", Code::kCorrupt, "model.type: found number 3"},
    {"vocab_missing", "/model/vocab", "", Code::kCorrupt, "model.vocab: found nothing"},
    {"vocab_array", "/model/vocab", "[\"a\"]", Code::kCorrupt, "expected an object"},
    {"vocab_empty", "/model/vocab", "{}", Code::kCorrupt, "at least one token"},
    {"id_duplicate", "/model/vocab/b", "0", Code::kCorrupt, "model.vocab[\"b\"]: found id 0"},
    {"id_negative", "/model/vocab/b", "-1", Code::kCorrupt, "model.vocab[\"b\"]: found number -1"},
    {"id_huge", "/model/vocab/b", "18446744073709551615", Code::kCorrupt, "0 to 2147483647"},
    {"id_2_31", "/model/vocab/b", "2147483648", Code::kCorrupt, "0 to 2147483647"},
    {"id_float", "/model/vocab/b", "1.5", Code::kCorrupt, "found number 1.5"},
    {"id_string", "/model/vocab/b", "\"1\"", Code::kCorrupt, "found string \"1\""},
    {"merges_missing", "/model/merges", "", Code::kCorrupt, "model.merges: found nothing"},
    {"merges_object", "/model/merges", "{}", Code::kCorrupt, "expected an array"},
    {"merge_unknown_left", "/model/merges/0", "[\"x\",\"b\"]", Code::kCorrupt,
     "model.merges[0]: found \"x\", expected a token of the vocabulary"},
    {"merge_unknown_right", "/model/merges/0", "\"a y\"", Code::kCorrupt, "found \"y\""},
    {"merge_unknown_result", "/model/merges/0", "\"b a\"", Code::kCorrupt, "found \"ba\""},
    {"merge_three", "/model/merges/0", "\"a b a\"", Code::kCorrupt, "two tokens and one space"},
    {"merge_one", "/model/merges/0", "\"ab\"", Code::kCorrupt, "two tokens and one space"},
    {"merge_number", "/model/merges/0", "7", Code::kCorrupt, "found number 7"},
    {"merge_array_of_3", "/model/merges/0", "[\"a\",\"b\",\"a\"]", Code::kCorrupt, "found array"},
    {"unk_unknown", "/model/unk_token", "\"<unk>\"", Code::kCorrupt, "model.unk_token"},
    {"dropout", "/model/dropout", "0.1", Code::kUnsupported, "model.dropout"},
    {"dropout_string", "/model/dropout", "\"no\"", Code::kCorrupt, "expected a number"},
    {"subword_prefix", "/model/continuing_subword_prefix", "\"##\"", Code::kUnsupported, "\"##\""},
    {"byte_fallback_number", "/model/byte_fallback", "1", Code::kCorrupt, "expected a boolean"},
    {"version", "/version", "\"2.0\"", Code::kUnsupported, "version: \"2.0\""},
    {"added_object", "/added_tokens", "{}", Code::kCorrupt, "added_tokens: found object"},
    {"added_number", "/added_tokens/0", "5", Code::kCorrupt, "added_tokens[0]: found number 5"},
    {"added_long", "/added_tokens/0/content", kLongToken.c_str(), Code::kCorrupt,
     "a string of 1025 bytes"},
    {"added_grows", "/added_tokens/0", kGrowingToken.c_str(), Code::kCorrupt,
     "a string of 1800 bytes when normalized"},
    {"added_no_id", "/added_tokens/0/id", "", Code::kCorrupt, "added_tokens[0].id: found nothing"},
    {"added_id_clash", "/added_tokens/0/id", "1", Code::kCorrupt, "but \"b\" has it too"},
    {"added_other_id", "/added_tokens/0/content", "\"ab\"", Code::kCorrupt, "the id of \"ab\""},
    {"added_empty", "/added_tokens/0/content", "\"\"", Code::kCorrupt, "an empty string"},
    {"added_flag", "/added_tokens/0/lstrip", "\"yes\"", Code::kCorrupt, "added_tokens[0].lstrip"},
    {"normalizer_unknown", "/normalizer/type", "\"Lowercase\"", Code::kUnsupported,
     "normalizer.type: normalizer \"Lowercase\""},
    {"normalizer_string", "/normalizer", "\"NFC\"", Code::kCorrupt, "normalizer: found string"},
    {"normalizer_no_type", "/normalizer/type", "", Code::kCorrupt, "normalizer.type"},
    {"pre_tokenizer_unknown", "/pre_tokenizer/type", "\"BertPreTokenizer\"", Code::kUnsupported,
     "pre-tokenizer \"BertPreTokenizer\""},
    {"regex_bad", "/pre_tokenizer/pattern/Regex", "\"(a\"", Code::kCorrupt,
     "pre_tokenizer.pattern: not a valid regular expression"},
    {"regex_possessive", "/pre_tokenizer/pattern/Regex", "\"a{1,3}+\"", Code::kUnsupported,
     "{n,m} with a suffix"},
    {"regex_boundary", "/pre_tokenizer/pattern/Regex", "\"a\\\\b\"", Code::kUnsupported, "\\b"},
    {"regex_nested_set", "/pre_tokenizer/pattern/Regex", "\"[a[bc]]\"", Code::kUnsupported, "set"},
    {"regex_any_byte", "/pre_tokenizer/pattern/Regex", "\"\\\\C\"", Code::kUnsupported, "\\C"},
    {"pattern_empty", "/pre_tokenizer/pattern", "{}", Code::kCorrupt, "pattern.String"},
    {"behavior", "/pre_tokenizer/behavior", "\"Sideways\"", Code::kUnsupported, "\"Sideways\""},
    {"behavior_missing", "/pre_tokenizer/behavior", "", Code::kCorrupt, "pre_tokenizer.behavior"},
    {"sequence_item", "/pre_tokenizer",
     R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, 3]})", Code::kCorrupt,
     "pre_tokenizer.pretokenizers[1]: found number 3"},
    {"metaspace_two", "/pre_tokenizer", R"({"type": "Metaspace", "replacement": "ab"})",
     Code::kCorrupt, "expected one character"},
    {"decoder_unknown", "/decoder/type", "\"WordPiece\"", Code::kUnsupported,
     "decoder \"WordPiece\""},
    {"decoder_strip", "/decoder", R"({"type": "Strip", "content": " ", "start": -1, "stop": 0})",
     Code::kCorrupt, "decoder.start: found number -1"},
    {"post_unknown", "/post_processor/type", "\"BertProcessing\"", Code::kUnsupported,
     "post-processor \"BertProcessing\""},
    {"post_no_text", "/post_processor/single", "[]", Code::kCorrupt, "found no Sequence"},
    {"post_unnamed", "/post_processor/special_tokens", "{}", Code::kCorrupt,
     "post_processor.special_tokens.<s>: found nothing"},
    {"post_id", "/post_processor/special_tokens/<s>/ids/0", "77", Code::kCorrupt, "found id 77"},
};

class MalformedTokenizer : public ::testing::TestWithParam<Malformed> {
 protected:
  Status load(const std::string& text, const char* name = "tokenizer.json") {
    std::ofstream(directory_.file(name), std::ios::binary) << text;
    return Tokenizer::load(directory_.file(name)).status();
  }
  TemporaryDirectory directory_;
};

Json good() {
  return Json::parse(kGood);
}

TEST_P(MalformedTokenizer, IsRefused) {
  ASSERT_TRUE(load(kGood).ok()) << load(kGood).message();
  Json file = good();
  const Json::json_pointer pointer(GetParam().pointer);
  if (*GetParam().value == '\0') {
    file[pointer.parent_pointer()].erase(pointer.back());
  } else {
    file[pointer] = Json::parse(GetParam().value);
  }
  const Status status = load(file.dump());
  EXPECT_EQ(status.code(), GetParam().code) << status.message();
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("/tokenizer.json: "), HasSubstr(GetParam().message)));
}

INSTANTIATE_TEST_SUITE_P(Fields, MalformedTokenizer, ::testing::ValuesIn(kMalformed),
                         [](const auto& param_info) { return param_info.param.name; });

class MalformedFile : public MalformedTokenizer {};

TEST_F(MalformedFile, EveryTruncationIsRefused) {
  const std::string text = kGood;
  for (size_t length = 0; length < text.size(); ++length) {
    const Status status = Tokenizer::parse(text.substr(0, length), "tokenizer.json").status();
    EXPECT_EQ(status.code(), Code::kCorrupt) << length << ": " << status.message();
  }
}

// Whatever a flipped bit makes of the file, it loads or is refused; the sanitizers watch.
TEST_F(MalformedFile, EveryFlippedBitIsHandled) {
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

TEST_F(MalformedFile, NotAnObjectAndNotJson) {
  EXPECT_EQ(load("[]").code(), Code::kCorrupt);
  EXPECT_EQ(load("null").code(), Code::kCorrupt);
  EXPECT_EQ(load("{\"model\": {}, \"model\": {}}").code(), Code::kCorrupt);
  EXPECT_EQ(load(std::string(100000, '[')).code(), Code::kCorrupt);
  std::string nested = "{\"model\":";
  for (int i = 0; i < 100000; ++i) nested += "{\"a\":";
  EXPECT_EQ(load(nested).code(), Code::kCorrupt);
  EXPECT_EQ(load(std::string("{\"model\":\0}", 11)).code(), Code::kCorrupt);
  EXPECT_EQ(load("{\"model\": \"\xff\"}").code(), Code::kCorrupt);
}

TEST_F(MalformedFile, NestedSequencesStopAtTheDepthOfTheParser) {
  Json step = {{"type", "NFC"}};
  for (int i = 0; i < 25; ++i) step = {{"type", "Sequence"}, {"normalizers", {step}}};
  Json file = good();
  file["normalizer"] = step;
  EXPECT_TRUE(load(file.dump()).ok());
  for (int i = 0; i < 25; ++i) step = {{"type", "Sequence"}, {"normalizers", {step}}};
  file["normalizer"] = step;
  EXPECT_THAT(load(file.dump()).message(), HasSubstr("nested deeper"));
}

// Without the end where they met the last time, so many spaces take hours.
TEST_F(MalformedFile, SpacesThatATokenTakesAlongAreSkippedOnce) {
  Json file = good();
  file.erase("post_processor");
  file["added_tokens"] = {{{"id", 5}, {"content", " "}, {"rstrip", true}}};
  std::ofstream(directory_.file("tokenizer.json")) << file.dump();
  const auto tokenizer = Tokenizer::load(directory_.file("tokenizer.json"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  std::vector<int32_t> ids;
  ASSERT_TRUE((*tokenizer)->encode(std::string(1 << 20, ' ') + "ab", false, ids).ok());
  ASSERT_EQ(ids.size(), (size_t{1} << 20) + 1);
  EXPECT_EQ(ids.front(), 5);
  EXPECT_EQ(ids.back(), 2);
}

TEST_F(MalformedFile, FarIdsCostNothing) {
  Json file = good();
  file["model"]["vocab"]["ab"] = 2147483647;
  std::ofstream(directory_.file("tokenizer.json")) << file.dump();
  const auto tokenizer = Tokenizer::load(directory_.file("tokenizer.json"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ((*tokenizer)->vocab_size(), int64_t{1} << 31);
  std::vector<int32_t> ids;
  ASSERT_TRUE((*tokenizer)->encode("ab", true, ids).ok());
  EXPECT_EQ(ids, (std::vector<int32_t>{5, 2147483647}));
}

TEST_F(MalformedFile, NulInTokensIsAByteLikeOthers) {
  Json file = good();
  file["model"]["vocab"][std::string("\0", 1)] = 9;
  std::ofstream(directory_.file("tokenizer.json")) << file.dump();
  const auto tokenizer = Tokenizer::load(directory_.file("tokenizer.json"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  std::vector<int32_t> ids;
  ASSERT_TRUE((*tokenizer)->encode(std::string("a\0b", 3), false, ids).ok());
  EXPECT_EQ(ids, (std::vector<int32_t>{0, 9, 1}));
}

}  // namespace
}  // namespace sqz
