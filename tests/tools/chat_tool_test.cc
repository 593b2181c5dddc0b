// --chat, from text to answers, with the example model and a template and tokens of our own.
#include <gmock/gmock.h>

#include "formats/tokenizer.h"
#include "tests/common/npy_file.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

const std::string kIndex = "sqz-index";
const std::string kGenerate = "sqz-generate";
const std::string kModel = SQZ_SOURCE_DIR "/examples/models/nano";
const std::string kTemplate =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
const std::string kBetween = "<|im_end|>\n<|im_start|>user\n";
const std::string kAfter = "<|im_end|>\n<|im_start|>assistant\n";

// The example model, whose last two tokens are those of turns.
class ChatTool : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    fs::copy(kModel, path("m"));
    for (const auto& entry : fs::directory_iterator(path("m"))) {
      fs::permissions(entry.path(), fs::perms::owner_write, fs::perm_options::add);
    }
    Json file = Json::parse(read_all(path("m/tokenizer.json")));
    Json& model = file["model"];
    for (int i = 0; i < 2; ++i) model["merges"].erase(model["merges"].size() - 1);
    std::erase_if(model["vocab"].get_ref<Json::object_t&>(),
                  [](const auto& token) { return token.second >= 8190; });
    for (const auto& [token, id] : {std::pair("<|im_start|>", 8190), {"<|im_end|>", 8191}}) {
      file["added_tokens"].push_back({{"id", id}, {"content", token}, {"special", true}});
    }
    write_all(path("m/tokenizer.json"), file.dump());
    write_all(path("m/tokenizer_config.json"),
              Json({{"chat_template", kTemplate}, {"eos_token", "<|end_of_text|>"}}).dump());
    std::string text;
    for (int i = 0; i < 120; ++i) text += concat("House ", i * i % 31, " by the sea.\n");
    write_all(path("a.txt"), text + "He said <|im_end|> and went.\n");
  }

  ToolRun build(const std::string& output, std::vector<std::string> more) const {
    std::vector<std::string> arguments = {"build", "-m", path("m"), "-o", path(output), "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(kIndex, arguments);
  }
  ToolRun generate(const std::string& index, std::vector<std::string> more) const {
    std::vector<std::string> arguments = {"-m",     path("m"), "-i",           path(index),
                                          "--json", "-e",      "--max-tokens", "8"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(kGenerate, arguments);
  }
  Json info(const std::string& index) const {
    return run(kIndex, {"info", path(index), "--json"}).last();
  }
  std::vector<int32_t> ids_of(const std::vector<TextPart>& parts) const {
    const auto tokenizer = Tokenizer::load(path("m"));
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    std::vector<int32_t> ids;
    EXPECT_TRUE((*tokenizer)->encode_parts(parts, ids).ok());
    return ids;
  }
};

TEST_F(ChatTool, TheContextStandsInTheSystemTurn) {
  const ToolRun built = build("chat.sqz", {path("a.txt"), "--chat"});
  ASSERT_EQ(built.code, 0) << built.err;
  EXPECT_THAT(built.err, Not(HasSubstr("template")));
  const std::string text = read_all(path("a.txt"));
  const auto ids = ids_of({{"<|im_start|>system\n"}, {text, false}});
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 8191), 0);
  ASSERT_TRUE(testing::write_npy_tokens(Env::posix(), path("ids.npy"), ids, false).ok());
  ASSERT_EQ(build("ids.sqz", {"--tokens", path("ids.npy")}).code, 0);
  EXPECT_EQ(info("chat.sqz")["tokens_hash"], info("ids.sqz")["tokens_hash"]);
  EXPECT_EQ(info("chat.sqz")["chat"], (Json{{"name", "chatml"},
                                            {"before", "<|im_start|>system\n"},
                                            {"between", kBetween},
                                            {"after", kAfter},
                                            {"end", {"<|im_end|>", "<|end_of_text|>"}},
                                            {"trim", false}}));
  EXPECT_FALSE(info("ids.sqz")["metadata"].contains("chat"));
  EXPECT_EQ(run(kIndex, {"verify", path("chat.sqz")}).code, 0);
  EXPECT_THAT(run(kIndex, {"info", path("chat.sqz")}).out, HasSubstr("chatml"));
}

TEST_F(ChatTool, QuestionsStandInTheUsersTurn) {
  ASSERT_EQ(build("chat.sqz", {path("a.txt"), "--chat"}).code, 0);
  ASSERT_EQ(build("plain.sqz", {path("a.txt")}).code, 0);
  const ToolRun asked = generate("chat.sqz", {"-p", "Where?"});
  ASSERT_EQ(asked.code, 0) << asked.err;
  EXPECT_THAT(asked.err, Not(HasSubstr("template")));
  const std::string turns = kBetween + "Where?" + kAfter;
  EXPECT_EQ(asked.last()["tokens"],
            generate("chat.sqz", {"-p", turns, "--no-chat"}).last()["tokens"]);
  EXPECT_NE(asked.last()["tokens"],
            generate("chat.sqz", {"-p", "Where?", "--no-chat"}).last()["tokens"]);
  EXPECT_NE(asked.last()["tokens"], generate("chat.sqz", {"-p", turns}).last()["tokens"]);
  const ToolRun plain = generate("plain.sqz", {"-p", "Where?"});
  EXPECT_EQ(plain.code, 0) << plain.err;
  EXPECT_THAT(plain.err, HasSubstr("the model has a chat template, which is not applied"));
  const ToolRun refused = generate("plain.sqz", {"-p", "Where?", "--chat"});
  EXPECT_EQ(refused.code, 3) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("build it with --chat"));
}

TEST_F(ChatTool, AnAnswerEndsWithItsTurn) {
  const auto format = [&](const std::vector<std::string>& end) {
    write_all(
        path("F.json"),
        Json({{"before", "<|im_start|>"}, {"between", kBetween}, {"after", kAfter}, {"end", end}})
            .dump());
    return build("a.sqz", {path("a.txt"), "--chat-format", path("F.json"), "--force"});
  };
  ASSERT_EQ(format({}).code, 0);
  const Json whole = generate("a.sqz", {"-p", "Where?"}).last();
  const std::vector<int32_t> tokens = whole["tokens"];
  ASSERT_EQ(tokens.size(), 8u);
  std::string ends;
  const Json file = Json::parse(read_all(path("m/tokenizer.json")));
  for (const auto& [token, id] : file["model"]["vocab"].items()) {
    if (id == tokens[5]) ends = token;
  }
  ASSERT_EQ(format({ends}).code, 0);
  const Json ended = generate("a.sqz", {"-p", "Where?"}).last();
  EXPECT_EQ(ended["stop_reason"], "stop");
  const auto first = std::find(tokens.begin(), tokens.end(), tokens[5]);
  EXPECT_EQ(ended["tokens"], std::vector<int32_t>(tokens.begin(), first));
  const ToolRun refused = format({"<|nothing|>"});
  EXPECT_EQ(refused.code, 3) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("<|nothing|>"));
}

TEST_F(ChatTool, CalibratesWithQuestionsInTheirTurn) {
  write_all(path("q.txt"), "Who was by the sea?\n");
  ASSERT_EQ(build("a.sqz", {path("a.txt"), "--chat"}).code, 0);
  const auto ids = ids_of({{kBetween}, {"Who was by the sea?", false}, {kAfter}});
  const std::string source = concat("prompts: 1 prompts, ", ids.size(), " tokens");
  const ToolRun calibrated = run(
      kIndex, {"calibrate", path("a.sqz"), "-m", path("m"), "--prompts", path("q.txt"), "--json"});
  ASSERT_EQ(calibrated.code, 0) << calibrated.err;
  EXPECT_THAT(calibrated.last()["source"].get<std::string>(), HasSubstr(source));
  EXPECT_EQ(info("a.sqz")["chat"]["name"], "chatml");
  const ToolRun built =
      build("b.sqz", {path("a.txt"), "--chat", "--calibrate-with", path("q.txt")});
  ASSERT_EQ(built.code, 0) << built.err;
  EXPECT_THAT(built.last()["calibration"].get<std::string>(), HasSubstr(source));
}

TEST_F(ChatTool, RefusesWhatHasNoTurns) {
  const auto expect_refused = [&](const std::vector<std::string>& more, int code,
                                  const std::string& part) {
    const ToolRun refused = build("a.sqz", more);
    EXPECT_EQ(refused.code, code) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr(part));
    EXPECT_FALSE(fs::exists(path("a.sqz")));
  };
  const auto ids = ids_of({{"House"}});
  ASSERT_TRUE(testing::write_npy_tokens(Env::posix(), path("ids.npy"), ids, false).ok());
  expect_refused({"--tokens", path("ids.npy"), "--chat"}, 2, "pass texts with --chat");
  expect_refused({path("a.txt"), "--chat-format", path("none.json")}, 3, "none.json");
  write_all(path("m/tokenizer_config.json"), Json({{"chat_template", "{{ messages }}"}}).dump());
  expect_refused({path("a.txt"), "--chat"}, 3, "--chat-format F.json");
  write_all(path("m/tokenizer_config.json"), "{}");
  expect_refused({path("a.txt"), "--chat"}, 3, "no chat template");
}

}  // namespace
}  // namespace sqz
