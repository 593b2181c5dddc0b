// sqz-index and sqz-generate with the example model: from text to answers.
#include <gmock/gmock.h>

#include "formats/tokenizer.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

struct Needle {
  const char* name;
  const char* number;
};
constexpr Needle kNeedles[] = {{"harbour", "1234567"}, {"lantern", "90210"}, {"castle", "48213"}};

std::string haystack() {
  std::string text = read_file(SQZ_SOURCE_DIR "/examples/texts/dracula.txt").substr(30000, 14000);
  double part = 0.8;
  for (const Needle& needle : kNeedles) {
    const size_t at = text.find('\n', static_cast<size_t>(part * static_cast<double>(text.size())));
    text.insert(at, concat("\nOne of the special magic numbers for ", needle.name,
                           " is: ", needle.number, ".\n"));
    part -= 0.3;
  }
  return text;
}

std::string question(const Needle& needle) {
  const std::string asked =
      concat("the special magic number for ", needle.name, " mentioned in the provided text");
  return concat("\\nWhat is ", asked, "? T", asked.substr(1), " is");
}

class ModelTools : public ToolTest {
 protected:
  void SetUp() override { write_file(path("a.txt"), prose(400)); }

  Json build(const std::string& output, const std::string& more) const {
    return expect({concat("sqz-index build -m $MODEL -o ", output, " ", more)});
  }
  // One prompt of any text, a token of answer.
  ToolCase ask(const std::string& more, int code, std::vector<std::string> parts) const {
    return {concat("sqz-generate -m $MODEL -i a.sqz -p x --max-tokens 1 ", more), code, parts};
  }
};

TEST_F(ModelTools, AnswersFromTheIndexAsDenseDoes) {
  write_file(path("hay.txt"), haystack());
  EXPECT_GT(build("a.sqz", "hay.txt")["tokens"], 3000);
  std::string lines, objects;
  for (const Needle& needle : kNeedles) {
    lines += question(needle) + "\n";
    objects += Json({{"prompt", question(needle)}, {"id", 7}}).dump() + "\n";
  }
  write_file(path("q.jsonl"), objects);
  const std::string common = "sqz-generate -m $MODEL -i a.sqz -e --max-tokens 12";
  const Json sparse = expect({common, 0, {}, lines + "\n"})["answers"];
  std::string windows = lines;  // with the ends that Windows gives its lines
  for (size_t at = 0; (at = windows.find('\n', at)) != std::string::npos; at += 2) {
    windows.insert(at, 1, '\r');
  }
  const Json dense = expect({common + " --dense", 0, {}, windows + "\r\n"})["answers"];
  EXPECT_EQ(dense[0]["prompt"], sparse[0]["prompt"]);
  ASSERT_EQ(sparse.size(), std::size(kNeedles));
  int found = 0, found_dense = 0;
  for (size_t i = 0; i < std::size(kNeedles); ++i) {
    // The first digits: the text behind the number is not the index's doing.
    const auto right = [&](const Json& answer) {
      return answer["text"].get<std::string>().substr(0, 5) ==
             concat(" ", kNeedles[i].number).substr(0, 5);
    };
    found += right(sparse[i]);
    found_dense += right(dense[i]);
    EXPECT_NEAR(sparse[i]["budget"]["delivered"], 0.125, 0.05);
    EXPECT_EQ(dense[i]["budget"]["delivered"], 1.0);
  }
  EXPECT_GE(found_dense, 2);
  EXPECT_GE(found, found_dense - 1);

  // Together: fewer at once than there are, and more; from standard input and from a file.
  for (const auto& [more, input] :
       {std::pair(std::string("--batch 2"), lines), {"--batch 9 --prompts q.jsonl", ""}}) {
    const Json together = expect(
        {common + " " + more, 0, {"tokens_per_second", "budget.delivered", "seconds.load"}, input});
    ASSERT_EQ(together["answers"].size(), sparse.size());
    for (size_t i = 0; i < sparse.size(); ++i) {
      EXPECT_EQ(together["answers"][i]["tokens"], sparse[i]["tokens"]) << more << ", " << i;
    }
  }
}

TEST_F(ModelTools, OnePromptGivesOneResultAndTextAlone) {
  build("a.sqz", "a.txt");
  const std::string common = "sqz-generate -m $MODEL -i a.sqz --max-tokens 8 --budget 0.5";
  const Json result = expect({common + " -p 'the house was'",
                              0,
                              {"prompt", "budget.asked", "keep.delivered", "dense_fallback",
                               "seconds.load", "seconds.prefill", "seconds.decode"}});
  EXPECT_EQ(result["tokens"].size(), 8u);
  EXPECT_EQ(result["stop_reason"], "length");
  const Json both = expect({common + " -p 'the house was' -p 'A road'", 0, {"answers"}});
  ASSERT_EQ(both["answers"].size(), 2u);
  EXPECT_EQ(both["answers"][0]["tokens"], result["tokens"]);
  // Without --json, standard output has the answer and nothing else.
  std::vector<std::string> words = words_of(common + " -p 'the house was'");
  words.erase(words.begin());
  const ToolRun plain = run("sqz-generate", words);
  EXPECT_EQ(plain.out, result["text"].get<std::string>() + "\n");
  EXPECT_THAT(plain.err, HasSubstr("of the fixed context"));
  words.emplace_back("-q");
  EXPECT_EQ(run("sqz-generate", words).out, plain.out);
  EXPECT_EQ(run("sqz-generate", words).err, "");
  // A text is there while the rest is being made.
  bool partly = false;
  words.insert(words.end(), {"--max-tokens=80"});
  std::erase(words, "8");
  std::erase(words, "--max-tokens");
  run("sqz-generate", words, "", {}, [&](pid_t child) {
    signal_when(child, 0, [&] {
      const std::string out = read_file(folder_ / "stdout");
      return partly = !out.empty() && !out.ends_with('\n');
    });
  });
  EXPECT_TRUE(partly);
}

TEST_F(ModelTools, TextsFoldersStandardInputAndIdsAreTheSameContext) {
  const std::string first = prose(400), second = "An appendix.\n" + prose(200);
  fs::create_directories(path("docs/b"));
  write_file(path("docs/a.txt"), first);
  write_file(path("docs/b/c.txt"), second);
  write_file(path("docs/.hidden"), "never read");
  write_file(path("docs/image.bin"), std::string("\x89PNG\0\0", 6));
  build("folder.sqz", "docs");
  build("files.sqz", "docs/a.txt docs/b/c.txt");
  write_file(path("docs/b/c.txt"), "\xef\xbb\xbf" + second);  // the mark is no text
  expect({"sqz-index build -m $MODEL -o stdin.sqz - docs/b/c.txt", 0, {}, first});
  for (const char* other : {"folder.sqz", "stdin.sqz"}) {
    EXPECT_TRUE(read_file(path(other)) == read_file(path("files.sqz"))) << other;
  }
  // The special tokens once at the start, then file after file.
  const auto tokenizer = Tokenizer::load(kModel).value();
  std::vector<int32_t> ids;
  ASSERT_TRUE(tokenizer->encode(first, true, ids).ok());
  ASSERT_TRUE(tokenizer->encode(second, false, ids).ok());
  write_ids("a.ids", ids);
  build("ids.sqz", "--tokens a.ids");
  const Json by_ids = expect({"sqz-index info ids.sqz"});
  const Json by_text = expect({"sqz-index info files.sqz"});
  EXPECT_EQ(by_ids["tokens_hash"], by_text["tokens_hash"]);
  EXPECT_EQ(by_ids["tokenizer_hash"], "");
  EXPECT_EQ(by_text["tokenizer_hash"], tokenizer->hash());
  EXPECT_EQ(build("cut.sqz", "docs --max-tokens 300")["tokens"], 300);
}

// Built after others, without computing these again. Read densely, all are one text.
TEST_F(ModelTools, AContextGrows) {
  const std::string text = haystack().substr(0, 6000);
  const auto tokenizer = Tokenizer::load(kModel).value();
  std::vector<int32_t> ids;
  ASSERT_TRUE(tokenizer->encode(text, true, ids).ok());
  write_ids("all.ids", ids);
  const auto part = [&](const char* name, size_t from, size_t to) {
    write_ids(name,
              {ids.begin() + static_cast<int64_t>(from), ids.begin() + static_cast<int64_t>(to)});
  };
  part("a.ids", 0, 600);
  part("b.ids", 600, 1000);
  part("c.ids", 1000, ids.size());
  build("all.sqz", "--tokens all.ids --rows f16");
  build("a.sqz", "--tokens a.ids --rows f16");
  build("b.sqz", "--tokens b.ids --rows f16 --after a.sqz");
  build("c.sqz", "--tokens c.ids --rows f16 --after a.sqz,b.sqz");
  const auto info = [&](const std::string& name) { return expect({"sqz-index info " + name}); };
  EXPECT_EQ(info("c.sqz")["after"],
            Json({info("a.sqz")["context_id"], info("b.sqz")["context_id"]}));
  const std::string ask =
      " --max-tokens 24 -e -p '\\nThe Count said that he' -p '\\nThe driver' -p '\\nI must'";
  const auto answers = [&](const std::string& indexes) {
    std::vector<Json> out;
    const Json result = expect({concat("sqz-generate -m $MODEL --dense ", indexes, ask)});
    for (const Json& answer : result["answers"]) out.push_back(answer["tokens"]);
    return out;
  };
  const auto whole = answers("-i all.sqz");
  ASSERT_EQ(whole.size(), 3u);
  EXPECT_EQ(whole[0].size(), 24u);
  EXPECT_EQ(answers("-i a.sqz -i b.sqz -i c.sqz"), whole);
  // A text that is another's continuation begins without special tokens.
  write_file(path("b.txt"), text);
  EXPECT_EQ(build("text.sqz", "b.txt --after a.sqz --dry-run")["tokens"], std::ssize(ids) - 1);

  const std::string generate = "sqz-generate -m $MODEL -p x",
                    apart = "contexts that stood in front";
  const std::string command = "sqz-index build -m $MODEL -o x.sqz b.txt ";
  write_ids("long.ids", std::vector<int32_t>(32500, 5));
  std::string eight, nine;
  for (int i = 0; i < 8; ++i) eight += i == 0 ? "a.sqz" : ",a.sqz";
  for (int i = 0; i < 9; ++i) nine += " -i a.sqz";
  const std::string names = files();
  expect_all(
      {{generate + " -i c.sqz", 3, {"c.sqz", apart}},
       {generate + " -i a.sqz -i c.sqz", 3, {"c.sqz", apart}},
       {generate + " -i b.sqz -i a.sqz -i c.sqz", 3, {apart}},
       {command + "--after b.sqz", 3, {"b.sqz", apart}},
       {command + "--after none.sqz", 3, {"none.sqz"}},
       {command + "--after " + eight, 2, {"--after", "7 required but received 8"}},
       {generate + nine, 2, {"--index", "8 required but received 9"}},
       {generate + " -i a.sqz --selector dense --budget 0.1", 2, {"--budget"}},
       {"sqz-index calibrate b.sqz -m $MODEL --prompts b.txt", 3, {"b.sqz", "--after"}},
       {command + "--after a.sqz --heavy-hitters", 2, {"--after"}},
       {"sqz-index build -m $MODEL b.txt --after a.sqz,b.sqz -o b.sqz --force",
        2,
        {"b.sqz", "is an input"}},
       {"sqz-index build -m $MODEL -o x.sqz --tokens long.ids --after a.sqz", 3, {"positions"}}});
  EXPECT_EQ(files(), names);
}

TEST_F(ModelTools, RefusesTextsThatMakeNoContext) {
  write_file(path("empty.txt"), "");
  write_file(path("bad.txt"), "good until here \xff then not");
  write_file(path("nul.txt"), std::string("a\0b", 3));
  write_file(path("short.txt"), "too short");
  write_file(path("long.txt"), prose(40000));
  fs::create_directories(path("void"));
  fs::copy(kModel, path("lfs"));
  fs::remove(path("lfs/model.safetensors"));
  write_file(path("lfs/model.safetensors"), "version https://git-lfs.github.com/spec/v1\n");
  std::vector<int32_t> ids(500, 1);
  ids[77] = 8192;
  write_ids("a.ids", ids);
  const std::string names = files();
  const std::string command = "sqz-index build -m $MODEL -o x.sqz ";
  expect_all({{command + "empty.txt", 3, {"empty.txt"}},
              {command + "bad.txt", 3, {"bad.txt", "byte 16"}},
              {command + "nul.txt", 3, {"nul.txt"}},
              {command + "missing.txt", 3, {"missing.txt"}},
              {command + "void", 3, {"void", "no text file"}},
              {"sqz-index build -m lfs -o x.sqz a.txt", 3, {"Git LFS pointer", "git lfs pull"}},
              {command + "short.txt", 2, {"tokens"}},
              {command + "long.txt", 3, {"32768 positions", "--max-tokens"}},
              {command + "--tokens a.ids", 3, {"a.ids", "id 8192", "8192 entries"}},
              {"sqz-index build -m $MODEL -o a.txt a.txt --force", 2, {"a.txt", "an input"}},
              {"sqz-index build -m a.txt -o x.sqz a.txt", 3, {"a.txt", "model folder"}}});
  EXPECT_EQ(files(), names);
}

TEST_F(ModelTools, RefusesAnIndexOfAnotherModelOrTokenizer) {
  build("a.sqz", "a.txt");
  const auto change = [&](const std::string& file, const std::string& from, const std::string& to) {
    fs::copy(kModel, path("other"), fs::copy_options::recursive);
    fs::permissions(path(file), fs::perms::owner_write, fs::perm_options::add);
    std::string text = read_file(path(file));
    write_file(path(file), text.replace(text.find(from), from.size(), to));
  };
  const std::string command = "sqz-generate -m other -i a.sqz -p x";
  change("other/config.json", "500000.0", "400000.0");
  expect({command, 3, {"a.sqz", "rope.theta"}});
  fs::remove_all(path("other"));
  change("other/tokenizer.json", "{", "{ ");
  expect({command, 3, {"a.sqz", "tokenizer"}});
}

TEST_F(ModelTools, GenerateRefusesWhatItCannotServe) {
  build("a.sqz", "a.txt");
  write_file(path("p.txt"), "good\n\xff\n");
  const std::string command = "sqz-generate -m $MODEL -i a.sqz";
  expect_all({{"sqz-generate -m $MODEL -i none.sqz -p x", 3, {"none.sqz"}},
              {command, 2, {"no prompt"}, "\n\n"},
              {command + " --batch 2", 2, {"no prompt"}, "\n\n"},
              {command + " --prompts p.txt", 3, {"p.txt: line 2", "UTF-8", "byte 0"}},
              ask("--budget 1.5", 2, {"--budget", "1.5"}),
              ask("--selector magic", 2, {"--selector"}),
              ask("--dense --budget 0.1", 2, {"--dense", "--budget"}),
              ask("--dense --selector squeezed", 2, {"--dense", "--selector"}),
              ask("--selector dense", 0, {})});
}

TEST_F(ModelTools, AChatTemplateIsNotAppliedAndItIsSaid) {
  fs::copy(kModel, path("chat"));
  const auto warned = [&] {
    const ToolRun built = run("sqz-index", {"build", "-m", path("chat"), path("a.txt"), "-o",
                                            path("a.sqz"), "--dry-run"});
    EXPECT_EQ(built.code, 0) << built.err;
    return built.err.find("chat template, which is not applied") != std::string::npos;
  };
  write_file(path("chat/tokenizer_config.json"), R"({"chat_template": null})");
  EXPECT_FALSE(warned());
  write_file(path("chat/tokenizer_config.json"), R"({"chat_template": "{{ messages }}"})");
  EXPECT_TRUE(warned());
  write_file(path("chat/tokenizer_config.json"), "{}");
  write_file(path("chat/chat_template.jinja"), "{{ messages }}");
  EXPECT_TRUE(warned());
}

TEST_F(ModelTools, ServesEveryKindOfIndexWithoutASelector) {
  write_file(path("b.txt"), prose(1500));
  build("clusters.sqz", "b.txt --heavy-hitters");
  build("pages.sqz", "b.txt --partition pages");
  expect({"sqz-index prune clusters.sqz --selector h2o --budget 0.3 -o pruned.sqz"});
  for (const auto& [index, selector, budget] :
       {std::tuple{"clusters.sqz", "squeezed", 0.125}, std::tuple{"pages.sqz", "quest", 0.125},
        std::tuple{"pruned.sqz", "h2o", 0.3}}) {
    const std::string command =
        concat("sqz-generate -m $MODEL -i ", index, " -p 'The harbour' --max-tokens 4");
    const Json own = expect({command});
    const Json named = expect({concat(command, " --selector ", selector, " --budget ", budget)});
    EXPECT_EQ(own["tokens"], named["tokens"]) << index;
    EXPECT_EQ(own["budget"], named["budget"]) << index;
    EXPECT_DOUBLE_EQ(own["budget"]["asked"], budget) << index;
  }
}

}  // namespace
}  // namespace sqz
