// --chat, from text to answers, with the example model and a template and tokens of our own.
#include <gmock/gmock.h>

#include "formats/tokenizer.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

const std::string kBefore = "<|im_start|>system\n";
const std::string kBetween = "<|im_end|>\n<|im_start|>user\n";
const std::string kAfter = "<|im_end|>\n<|im_start|>assistant\n";

// The example model, whose last two tokens are those of turns.
class ChatTool : public ToolTest {
 protected:
  void SetUp() override {
    fs::copy(kModel, path("m"));
    for (const auto& entry : fs::directory_iterator(path("m"))) {
      fs::permissions(entry.path(), fs::perms::owner_write, fs::perm_options::add);
    }
    Json file = Json::parse(read_file(path("m/tokenizer.json")));
    Json& model = file["model"];
    for (int i = 0; i < 2; ++i) model["merges"].erase(model["merges"].size() - 1);
    std::erase_if(model["vocab"].get_ref<Json::object_t&>(),
                  [](const auto& token) { return token.second >= 8190; });
    for (const auto& [token, id] : {std::pair("<|im_start|>", 8190), {"<|im_end|>", 8191}}) {
      file["added_tokens"].push_back({{"id", id}, {"content", token}, {"special", true}});
    }
    write_file(path("m/tokenizer.json"), file.dump());
    write_format({"<|im_end|>", "<|end_of_text|>"});
    std::string text;
    for (int i = 0; i < 120; ++i) text += concat("House ", i * i % 31, " by the sea.\n");
    write_file(path("a.txt"), text + "He said <|im_end|> and went.\n");
  }

  void write_format(const std::vector<std::string>& end) const {
    write_file(
        path("F.json"),
        Json({{"before", kBefore}, {"between", kBetween}, {"after", kAfter}, {"end", end}}).dump());
  }
  Json build(const std::string& output, const std::string& more) const {
    return expect({concat("sqz-index build -m m -o ", output, " ", more)});
  }
  Json generate(const std::string& index, const std::string& prompt,
                const std::string& more = "") const {
    return expect(
        {concat("sqz-generate -m m -i ", index, " --max-tokens 8 -p '", prompt, "' ", more)});
  }
  Json info(const std::string& index) const { return expect({"sqz-index info " + index}); }
  std::vector<int32_t> ids_of(const std::vector<TextPart>& parts) const {
    const auto tokenizer = Tokenizer::load(path("m"));
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    std::vector<int32_t> ids;
    EXPECT_TRUE((*tokenizer)->encode_parts(parts, ids).ok());
    return ids;
  }
};

TEST_F(ChatTool, TheContextStandsInTheSystemTurn) {
  build("chat.sqz", "a.txt --chat F.json");
  const auto ids = ids_of({{kBefore}, {read_file(path("a.txt")), false}});
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 8191), 0);
  write_ids("a.ids", ids);
  build("ids.sqz", "--tokens a.ids");
  EXPECT_EQ(info("chat.sqz")["tokens_hash"], info("ids.sqz")["tokens_hash"]);
  EXPECT_EQ(info("chat.sqz")["chat"], (Json{{"before", kBefore},
                                            {"between", kBetween},
                                            {"after", kAfter},
                                            {"end", {"<|im_end|>", "<|end_of_text|>"}},
                                            {"trim", false}}));
  EXPECT_FALSE(info("ids.sqz")["metadata"].contains("chat"));
}

TEST_F(ChatTool, QuestionsStandInTheUsersTurn) {
  build("chat.sqz", "a.txt --chat F.json");
  build("plain.sqz", "a.txt");
  const std::string turns = kBetween + "Where?" + kAfter;
  const Json asked = generate("chat.sqz", "Where?")["tokens"];
  EXPECT_EQ(asked, generate("chat.sqz", turns, "--no-chat")["tokens"]);
  EXPECT_NE(asked, generate("chat.sqz", "Where?", "--no-chat")["tokens"]);
  EXPECT_NE(asked, generate("chat.sqz", turns)["tokens"]);
  generate("plain.sqz", "Where?");
  expect({"sqz-generate -m m -i plain.sqz -p Where? --chat", 3, {"build it with --chat"}});
}

TEST_F(ChatTool, AnAnswerEndsWithItsTurn) {
  write_format({});
  build("a.sqz", "a.txt --chat F.json");
  const std::vector<int32_t> tokens = generate("a.sqz", "Where?")["tokens"];
  ASSERT_EQ(tokens.size(), 8u);
  std::string ends;
  const Json file = Json::parse(read_file(path("m/tokenizer.json")));
  for (const auto& [token, id] : file["model"]["vocab"].items()) {
    if (id == tokens[5]) ends = token;
  }
  write_format({ends});
  build("a.sqz", "a.txt --chat F.json --force");
  const Json ended = generate("a.sqz", "Where?");
  EXPECT_EQ(ended["stop_reason"], "stop");
  const auto first = std::find(tokens.begin(), tokens.end(), tokens[5]);
  EXPECT_EQ(ended["tokens"], std::vector<int32_t>(tokens.begin(), first));
}

TEST_F(ChatTool, CalibratesWithQuestionsInTheirTurn) {
  write_file(path("q.txt"), "Who was by the sea?\n");
  build("a.sqz", "a.txt --chat F.json");
  const auto ids = ids_of({{kBetween}, {"Who was by the sea?", false}, {kAfter}});
  const std::string source = concat("prompts: 1 prompts, ", ids.size(), " tokens");
  const Json calibrated = expect({"sqz-index calibrate a.sqz -m m --prompts q.txt"});
  EXPECT_THAT(calibrated["source"].get<std::string>(), HasSubstr(source));
  EXPECT_EQ(info("a.sqz")["chat"]["between"], kBetween);
}

TEST_F(ChatTool, RefusesContextsWithoutTurns) {
  write_ids("a.ids", ids_of({{"House"}}));
  write_format({"<|none|>"});
  const std::string command = "sqz-index build -m m -o x.sqz ";
  expect_all({{command + "--tokens a.ids --chat F.json", 2, {"pass texts with --chat"}},
              {command + "a.txt --chat none.json", 3, {"none.json"}},
              {command + "a.txt --chat F.json", 3, {"<|none|>"}}});
  EXPECT_FALSE(fs::exists(path("x.sqz")));
}

}  // namespace
}  // namespace sqz
