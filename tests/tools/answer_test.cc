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

struct Shown {
  std::string all;
  std::vector<std::string> pieces;

  // Feeds `text`; returns how many tokens were taken.
  size_t feed(Answer& answer, const std::string& text) {
    size_t taken = 0;
    for (const char c : text) {
      ++taken;
      if (!answer.add(static_cast<unsigned char>(c))) break;
    }
    return taken;
  }
  std::function<void(const std::string&)> sink() {
    return [this](const std::string& piece) {
      all += piece;
      pieces.push_back(piece);
    };
  }
};

const ByteTokenizer kTokenizer;

TEST(AnswerTest, ShowsTextAsItComes) {
  Shown shown;
  Answer answer(kTokenizer, {}, shown.sink());
  EXPECT_EQ(shown.feed(answer, "abc"), 3u);
  EXPECT_EQ(shown.pieces.size(), 3u);
  answer.finish();
  EXPECT_EQ(shown.all, "abc");
  EXPECT_EQ(answer.text(), "abc");
}

TEST(AnswerTest, NeverShowsHalfACharacter) {
  Shown shown;
  Answer answer(kTokenizer, {}, shown.sink());
  answer.add('x');
  answer.add(0xc3);  // first byte of U+00E9
  EXPECT_EQ(shown.all, "x");
  answer.add(0xa9);
  EXPECT_EQ(shown.all, "x\xc3\xa9");
}

TEST(AnswerTest, EndsAtAStopStringWithoutShowingIt) {
  Shown shown;
  Answer answer(kTokenizer, {"END", "\n"}, shown.sink());
  EXPECT_EQ(shown.feed(answer, "one EN two END three"), 14u);
  answer.finish();
  EXPECT_EQ(answer.text(), "one EN two ");
  EXPECT_EQ(shown.all, answer.text());
}

TEST(AnswerTest, ShowsAHeldBackBeginningOfAStopStringAtTheEnd) {
  Shown shown;
  Answer answer(kTokenizer, {"END"}, shown.sink());
  shown.feed(answer, "the EN");
  EXPECT_EQ(shown.all, "the ");
  answer.finish();
  EXPECT_EQ(shown.all, "the EN");
}

TEST(AnswerTest, TheEarliestStopStringWins) {
  Answer answer(kTokenizer, {"b", "ab"}, {});
  Shown shown;
  shown.feed(answer, "xxab");
  EXPECT_EQ(answer.text(), "xx");
}

TEST(AnswerTest, ReportsWhatCannotBeDecoded) {
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
