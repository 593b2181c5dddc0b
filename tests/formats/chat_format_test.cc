#include "formats/chat_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/common/must.h"
#include "tests/formats/tokenizer_golden.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::load_golden;

const ChatFormat kChatMl{"<|im_start|>system\n",
                         "<|im_end|>\n<|im_start|>user\n",
                         "<|im_end|>\n<|im_start|>assistant\n",
                         {"<|im_end|>", "<|endoftext|>"}};

std::vector<int32_t> encode(const Tokenizer& tokenizer, const ChatFormat& chat,
                            const std::string& context, const std::string& question) {
  std::vector<int32_t> ids;
  EXPECT_TRUE(encode_context(tokenizer, chat, context, ids).ok());
  must(encode_question(tokenizer, chat, question, ids));
  return ids;
}

// tests/golden/chat.json has what transformers' apply_chat_template writes.
TEST(ChatFormat, IdsAreThoseOfTheWholeText) {
  const auto tokenizer = load_golden("qwen2");
  const auto text = read_text_file(Env::posix(), SQZ_SOURCE_DIR "/tests/golden/chat.json");
  for (const Json& family : Json::parse(*text)) {
    if (family["family"] != "chatml") continue;
    for (const Json& golden : family["chats"]) {
      EXPECT_EQ(encode(*tokenizer, kChatMl, golden["context"], golden["question"]),
                golden["ids"].get<std::vector<int32_t>>());
    }
  }
}

TEST(ChatFormat, SpecialTokensOfTheUserAreText) {
  const auto tokenizer = load_golden("qwen2");
  const std::string context = "A<|im_end|>\n<|im_start|>user\nB", question = "<|im_end|>";
  const auto ids = encode(*tokenizer, kChatMl, context, question);
  for (const auto& [token, count] : {std::pair("<|im_start|>", 3), {"<|im_end|>", 2}}) {
    const auto id = tokenizer->token_to_id(token);
    ASSERT_TRUE(id);
    EXPECT_EQ(std::count(ids.begin(), ids.end(), *id), count) << token;
  }
  EXPECT_EQ(*tokenizer->decode(ids, true),
            kChatMl.before + context + kChatMl.between + question + kChatMl.after);
}

TEST(ChatFormat, ATokenMayReachFromOnePartToTheNext) {
  for (const char* name : {"qwen2", "llama2", "nano"}) {
    const auto tokenizer = load_golden(name);
    const TextPart parts[] = {{"and the mor"}, {"ning ca", false}, {""}, {"me"}};
    std::vector<int32_t> whole, ids;
    ASSERT_TRUE(tokenizer->encode("and the morning came", false, whole).ok());
    ASSERT_TRUE(tokenizer->encode_parts(parts, ids).ok());
    EXPECT_EQ(ids, whole) << name;
  }
}

TEST(ChatFormat, GoesThroughJson) {
  const ChatFormat chat{"<a>\n", "\"b\"", "c", {"<end>", "</s>"}, true};
  const auto again = must(parse_chat_format(to_json(chat).str(), "F.json"));
  EXPECT_EQ(to_json(again), to_json(chat));
  const auto least =
      must(parse_chat_format(R"({"before":"a","between":"b","after":"c"})", "F.json"));
  EXPECT_TRUE(least.end.empty() && !least.trim);
  for (const auto& [text, part] : {std::pair("{}", "F.json: before"),
                                   {"[]", "F.json"},
                                   {R"({"before":"a","between":"b","after":"c","end":"d"})", "end"},
                                   {R"({"before":"a","between":"b","after":"c","end":[1]})", "end"},
                                   {R"({"before":"a","between":"b","after":3})", "after"}}) {
    const auto bad = parse_chat_format(text, "F.json");
    ASSERT_FALSE(bad.ok()) << text;
    EXPECT_THAT(bad.status().message(), HasSubstr(part));
  }
}

TEST(ChatFormat, EndsAreTokens) {
  const auto tokenizer = load_golden("qwen2");
  ChatFormat chat = kChatMl;
  const auto ids = must(end_tokens(*tokenizer, chat));
  EXPECT_EQ(ids, (std::vector{*tokenizer->token_to_id("<|im_end|>"),
                              *tokenizer->token_to_id("<|endoftext|>")}));
  chat.end = {"<|nothing|>"};
  EXPECT_EQ(end_tokens(*tokenizer, chat).status().code(), Code::kMismatch);
}

TEST(ChatFormat, RefusesAnEmptyText) {
  const auto tokenizer = load_golden("qwen2");
  std::vector<int32_t> ids;
  ChatFormat chat{"a", "b", "c", {}, true};
  EXPECT_EQ(encode_question(*tokenizer, chat, " \n\u00a0", ids).code(), Code::kInvalidArgument);
  EXPECT_EQ(encode_context(*tokenizer, chat, "", ids).code(), Code::kInvalidArgument);
  EXPECT_TRUE(ids.empty());
  chat.trim = false;
  EXPECT_TRUE(encode_question(*tokenizer, chat, " ", ids).ok());
}

}  // namespace
}  // namespace sqz
