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

struct Case {
  const char* text;
  std::vector<std::string> stops;
  const char* before_end;  // shown while the answer may go on
  const char* shown;       // and in the end
  size_t taken;            // tokens, up to the one that completes a stop
};

TEST(AnswerTest, ShowsTextWhenItIsCertain) {
  for (const Case& wanted : {
           Case{"abc", {}, "abc", "abc", 3},
           Case{"x\xc3", {}, "x", "x\xef\xbf\xbd", 2},  // half of U+00E9
           Case{"x\xc3\xa9", {}, "x\xc3\xa9", "x\xc3\xa9", 3},
           Case{"one EN two END three", {"END", "\n"}, "one EN two ", "one EN two ", 14},
           Case{"the EN", {"END"}, "the ", "the EN", 6},
           Case{"xxab", {"b", "ab"}, "xx", "xx", 4},
       }) {
    SCOPED_TRACE(wanted.text);
    std::string shown;
    Answer answer(kTokenizer, wanted.stops, [&](const std::string& piece) { shown += piece; });
    size_t taken = 0;
    for (const char c : std::string_view(wanted.text)) {
      ++taken;
      if (!answer.add(static_cast<unsigned char>(c))) break;
    }
    EXPECT_EQ(taken, wanted.taken);
    EXPECT_EQ(shown, wanted.before_end);
    answer.finish();
    EXPECT_EQ(shown, wanted.shown);
    EXPECT_EQ(answer.text(), wanted.shown);
  }
}

TEST(AnswerTest, ReportsIdsThatCannotBeDecoded) {
  Answer answer(kTokenizer, {}, {});
  EXPECT_FALSE(answer.add(300));
  EXPECT_EQ(answer.status().code(), Code::kInvalidArgument);
}

TEST(AnswerTest, Unescape) {
  EXPECT_EQ(unescape("\\nWhat?\\t\\\\n"), "\nWhat?\t\\n");
  EXPECT_EQ(unescape("50\\% \\"), "50\\% \\");
}

}  // namespace
}  // namespace sqz
