// What a command reads is not written over: files of the model, and those that options name.
#include <gmock/gmock.h>

#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class InputFiles : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    fs::copy(SQZ_SOURCE_DIR "/examples/models/nano", path("nano"));
    std::string text;
    for (int i = 0; i < 300; ++i) text += "The old road by the sea was silent.\n";
    write_all(path("a.txt"), text);
    write_all(path("chat.json"), R"({"before": "", "between": "", "after": "", "end": []})");
    ASSERT_EQ(run("sqz-index", {"build", "--model", path("nano"), path("a.txt"), "-o",
                                path("a.sqz"), "--partition", "pages"})
                  .code,
              0);
  }

  // The command would write to `name`, with --force.
  void expect_kept(const std::string& tool, const std::string& name,
                   std::vector<std::string> arguments) const {
    const std::string before = read_all(path(name)), names = files();
    arguments.insert(arguments.end(), {"--model", path("nano"), "--force"});
    const ToolRun refused = run(tool, arguments);
    EXPECT_EQ(refused.code, 2) << tool << " " << arguments[0] << ": " << refused.err;
    EXPECT_THAT(refused.err, HasSubstr(name + ": is an input and the output; give another name"));
    EXPECT_TRUE(read_all(path(name)) == before);
    EXPECT_EQ(files(), names);
  }
};

TEST_F(InputFiles, OfAModelAreKept) {
  const std::string text = path("a.txt"), weights = "nano/model.safetensors";
  const std::string out = path(weights);
  expect_kept("sqz-index", weights, {"build", text, "-o", out});
  expect_kept("sqz-index", weights, {"build", text, "-o", out, "--resume"});
  expect_kept("sqz-index", weights, {"capture", text, "-o", out});
  expect_kept("sqz-index", weights, {"append", path("a.sqz"), text, "-o", out});
  expect_kept("sqz-index", "nano/../nano/tokenizer.json",
              {"capture", text, "-o", path("nano/../nano/tokenizer.json")});
  expect_kept("sqz-profile-layers", weights, {text, "-o", out});
  expect_kept("sqz-train-qmodel", weights, {text, "-o", out});
  expect_kept("sqz-train-qmodel", "nano/config.json",
              {text, "-o", path("q.sqz"), "--checkpoint", path("nano/config.json")});
}

// As a cache of models has them: links in the model's folder lead to files elsewhere.
TEST_F(InputFiles, OfAModelAreKeptWhereverTheyLie) {
  fs::rename(path("nano/config.json"), path("blob"));
  fs::create_symlink("../blob", path("nano/config.json"));
  expect_kept("sqz-index", "blob", {"build", path("a.txt"), "-o", path("blob")});
}

TEST_F(InputFiles, OfOptionsAreKept) {
  expect_kept(
      "sqz-index", "chat.json",
      {"build", path("a.txt"), "--chat-format", path("chat.json"), "-o", path("chat.json")});
}

TEST_F(InputFiles, IndexesBesideAModelAreReplaced) {
  for (int i = 0; i < 2; ++i) {
    const ToolRun built = run("sqz-index", {"build", "--model", path("nano"), path("a.txt"), "-o",
                                            path("nano/a.sqz"), "--partition", "pages", "--force"});
    EXPECT_EQ(built.code, 0) << built.err;
  }
}

}  // namespace
}  // namespace sqz
