#include "tools/sqz_generate/answer.h"

#include <gtest/gtest.h>

namespace sqz {
namespace {

// Token i is byte i; like the real ones, an unfinished UTF-8 character decodes as U+FFFD.
class ByteTokenizer : public Tokenizer {
 public:
  Status encode(std::string_view text, bool, std::vector<int32_t>& ids) const override {
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return {};
  }
  Status encode_parts(std::span<const TextPart>, std::vector<int32_t>&) const override {
    return {Code::kUnsupported, "no parts"};
  }
  Result<std::string> decode(std::span<const int32_t> ids, bool) const override {
    std::string out;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] > 255) return Status(Code::kInvalidArgument, "no such id");
      if (ids[i] < 0x80) {
        out += static_cast<char>(ids[i]);
      } else if (i + 1 < ids.size()) {  // two-byte characters only
        out += static_cast<char>(ids[i]);
        out += static_cast<char>(ids[++i]);
      } else {
        out += "\xef\xbf\xbd";
      }
    }
    return out;
  }
  int64_t vocab_size() const override { return 256; }
  std::optional<int32_t> token_to_id(std::string_view) const override { return {}; }
  std::optional<int32_t> bos_token() const override { return {}; }
  const std::string& hash() const override { return hash_; }

 private:
  std::string hash_;
};

const ByteTokenizer kTokenizer;

TEST(AnswerTest, ShowsWholeCharacters) {
  Answer answer(kTokenizer);
  std::vector<std::string> shown;
  for (const unsigned char c : std::string_view("x\xc3\xa9\xc3")) shown.push_back(answer.add(c));
  shown.push_back(answer.finish());
  EXPECT_EQ(shown, (std::vector<std::string>{"x", "", "\xc3\xa9", "", "\xef\xbf\xbd"}));
  EXPECT_EQ(answer.text(), "x\xc3\xa9\xef\xbf\xbd");
}

TEST(AnswerTest, ReportsIdsThatCannotBeDecoded) {
  Answer answer(kTokenizer);
  EXPECT_EQ(answer.add(300), "");
  EXPECT_EQ(answer.status().code(), Code::kInvalidArgument);
}

TEST(AnswerTest, Unescape) {
  EXPECT_EQ(unescape("\\nWhat?\\t\\\\n"), "\nWhat?\t\\n");
  EXPECT_EQ(unescape("50\\% \\"), "50\\% \\");
}

}  // namespace
}  // namespace sqz
