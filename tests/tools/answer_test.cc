#include "tools/sqz_generate/answer.h"

#include <gtest/gtest.h>

#include "formats/utf8.h"

namespace sqz {
namespace {

// Tokens of single bytes: an unfinished character is shown when it is whole, or at the end.
TEST(Answer, ShowsWholeCharacters) {
  const auto tokenizer = Tokenizer::load(SQZ_SOURCE_DIR "/examples/models/nano").value();
  std::vector<int32_t> ids;
  ASSERT_TRUE(tokenizer->encode("\xf0\x9f\xab\xa8", false, ids).ok());
  ASSERT_EQ(ids.size(), 4u);
  ids.push_back(ids[0]);
  Answer answer(*tokenizer);
  std::vector<std::string> shown;
  for (const int32_t id : ids) shown.push_back(answer.add(id));
  shown.push_back(answer.finish());
  const std::string whole = "\xf0\x9f\xab\xa8", cut = "\xef\xbf\xbd";
  EXPECT_EQ(shown, (std::vector<std::string>{"", "", "", whole, "", cut}));
  EXPECT_EQ(answer.text(), whole + cut);
  EXPECT_EQ(answer.add(static_cast<int32_t>(tokenizer->vocab_size())), "");
  EXPECT_EQ(answer.status().code(), Code::kInvalidArgument);
}

// A byte behind a character of byte tokens makes U+FFFD of the character, too, when it was shown.
TEST(Answer, ShowsValidTextWhereByteTokensEnd) {
  const auto tokenizer =
      Tokenizer::load(SQZ_SOURCE_DIR "/tests/golden/tokenizer/llama2.json").value();
  std::vector<int32_t> ids;
  for (const char* byte : {"<0xF0>", "<0x9F>", "<0xAB>", "<0xA8>", "<0xF0>"}) {
    ids.push_back(tokenizer->token_to_id(byte).value());
  }
  Answer answer(*tokenizer);
  std::string shown;
  for (const int32_t id : ids) shown += answer.add(id);
  shown += answer.finish();
  EXPECT_FALSE(find_invalid_utf8(shown));
  EXPECT_TRUE(shown.starts_with("\xf0\x9f\xab\xa8")) << shown;
}

TEST(Answer, Unescape) {
  EXPECT_EQ(unescape("\\nWhat?\\t\\\\n"), "\nWhat?\t\\n");
  EXPECT_EQ(unescape("50\\% \\"), "50\\% \\");
}

}  // namespace
}  // namespace sqz
