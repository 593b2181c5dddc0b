#include "tools/sqz_generate/answer.h"

#include <gtest/gtest.h>

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

TEST(Answer, Unescape) {
  EXPECT_EQ(unescape("\\nWhat?\\t\\\\n"), "\nWhat?\t\\n");
  EXPECT_EQ(unescape("50\\% \\"), "50\\% \\");
}

}  // namespace
}  // namespace sqz
