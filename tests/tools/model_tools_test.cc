// sqz-index and sqz-generate with the example model: from text to answers.
#include <gmock/gmock.h>

#include <fstream>

#include "formats/tokenizer.h"
#include "tests/common/npy_file.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
namespace fs = std::filesystem;

const std::string kIndex = "sqz-index";
const std::string kGenerate = "sqz-generate";
const std::string kModel = SQZ_SOURCE_DIR "/examples/models/nano";

struct Needle {
  const char* name;
  const char* number;
};
constexpr Needle kNeedles[] = {{"harbour", "1234567"}, {"lantern", "90210"}, {"castle", "48213"}};

// Running prose of about `words` words, the same every time. The model need not like it.
std::string prose(int words) {
  const char* vocabulary[] = {"the",  "house", "was",  "silent", "and",   "old", "road",  "by",
                              "sea",  "they",  "went", "slowly", "under", "a",   "heavy", "sky",
                              "with", "no",    "word", "spoken", "until", "it",  "grew",  "dark"};
  std::string out;
  uint32_t state = 12345;
  for (int i = 0; i < words; ++i) {
    state = state * 1664525u + 1013904223u;
    out += vocabulary[(state >> 16) % std::size(vocabulary)];
    out += i % 13 == 12 ? ".\n" : " ";
  }
  return out;
}

// A haystack of about 4,000 tokens: the example book if it is there, with needles in it.
std::string haystack() {
  std::string text = read_all(SQZ_SOURCE_DIR "/examples/texts/dracula.txt");
  text = text.size() > 60000 ? text.substr(30000, 14000) : prose(3200);
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
  const std::string what =
      concat("the special magic number for ", needle.name, " mentioned in the provided text");
  return concat("\\nWhat is ", what, "? T", what.substr(1), " is");
}

class ModelToolsTest : public ToolTest {
 protected:
  ToolRun build(const std::string& output, std::vector<std::string> more,
                const std::string& input = "") {
    std::vector<std::string> arguments = {"build", "--model", kModel, "-o", path(output), "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(kIndex, arguments, input);
  }

  ToolRun generate(const std::string& index, std::vector<std::string> more,
                   const std::string& input = "") {
    std::vector<std::string> arguments = {"--model", kModel, "--index", path(index),
                                          "--json",  "-e",   "--stop",  "\\n"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(kGenerate, arguments, input);
  }

  std::string text_file(const std::string& name, const std::string& text) {
    fs::create_directories(fs::path(path(name)).parent_path());
    write_all(path(name), text);
    return path(name);
  }

  void expect_refused(const ToolRun& refused, int code, const std::string& part) {
    EXPECT_EQ(refused.code, code) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr(part));
    EXPECT_EQ(files().find(".sqz"), std::string::npos) << files();
  }
};

TEST_F(ModelToolsTest, AnswersFromTheIndexAsDenseDoes) {
  const std::string text = text_file("hay.txt", haystack());
  const Json built = build("hay.sqz", {text}).last();
  EXPECT_GT(built["tokens"], 3000);
  EXPECT_GT(built["seconds"]["capture"], 0);
  std::string prompts;
  for (const Needle& needle : kNeedles) prompts += question(needle) + "\n";
  const ToolRun sparse = generate("hay.sqz", {"--max-tokens", "12"}, prompts + "\n");
  const ToolRun dense = generate("hay.sqz", {"--max-tokens", "12", "--dense"}, prompts);
  ASSERT_EQ(sparse.code, 0) << sparse.err;
  ASSERT_EQ(dense.code, 0) << dense.err;
  ASSERT_EQ(sparse.events().size(), std::size(kNeedles) + 1);  // one an answer, and the result
  const Json answers = sparse.last()["answers"], reference = dense.last()["answers"];
  int found = 0, found_dense = 0;
  for (size_t i = 0; i < std::size(kNeedles); ++i) {
    const std::string expected = concat(" ", kNeedles[i].number);
    // The first digits: what the model says after the number is not the index's doing.
    const auto same = [&](const Json& answer) {
      return answer["text"].get<std::string>().substr(0, 5) == expected.substr(0, 5);
    };
    found += same(answers[i]);
    found_dense += same(reference[i]);
    EXPECT_NEAR(answers[i]["budget"]["asked"], 0.125, 1e-9);
    EXPECT_GT(answers[i]["budget"]["delivered"], 0.05);
    EXPECT_LT(answers[i]["budget"]["delivered"], 0.3);
    EXPECT_DOUBLE_EQ(reference[i]["budget"]["delivered"], 1.0);
    EXPECT_FALSE(answers[i]["tokens"].empty());
    EXPECT_TRUE(answers[i]["seconds"]["prefill"].is_number());
  }
  EXPECT_GE(found_dense, 2);
  EXPECT_GE(found, found_dense - 1);
}

TEST_F(ModelToolsTest, OnePromptGivesOneResultAndTextAlone) {
  ASSERT_EQ(build("a.sqz", {text_file("a.txt", prose(600))}).code, 0);
  const Json result =
      generate("a.sqz", {"--prompt", "the house was", "--max-tokens", "3", "--budget", "0.5"})
          .last();
  EXPECT_EQ(result["tokens"].size(), 3u);
  EXPECT_EQ(result["stop_reason"], "length");
  // Without --json: the answer on stdout and nothing else.
  const ToolRun plain = run(kGenerate, {"--model", kModel, "--index", path("a.sqz"), "--prompt",
                                        "the house was", "--max-tokens", "3", "--budget", "0.5"});
  EXPECT_EQ(plain.out, result["text"].get<std::string>() + "\n");
  EXPECT_THAT(plain.err, HasSubstr("of the fixed context"));
  // Sampling: the seed decides.
  const auto sample = [&](const char* seed) {
    return generate("a.sqz", {"--prompt", "the house was", "--max-tokens", "8", "--budget", "0.5",
                              "--temperature", "1.5", "--seed", seed})
        .last()["tokens"];
  };
  EXPECT_EQ(sample("1"), sample("1"));
  EXPECT_NE(sample("1"), sample("2"));
}

TEST_F(ModelToolsTest, CaptureAndModelBuildTheSameBytes) {
  const std::string text = text_file("a.txt", prose(700));
  ASSERT_EQ(build("model.sqz", {text}).code, 0);
  const ToolRun captured =
      run(kIndex, {"capture", "--model", kModel, text, "-o", path("a.h5"), "--json"});
  ASSERT_EQ(captured.code, 0) << captured.err;
  EXPECT_EQ(captured.last()["layers"], 6);
  EXPECT_EQ(captured.last()["bytes"], fs::file_size(path("a.h5")));
  const ToolRun built =
      run(kIndex, {"build", "--capture", path("a.h5"), "-o", path("capture.sqz"), "--json"});
  ASSERT_EQ(built.code, 0) << built.err;
  EXPECT_EQ(built.last()["tokens"], captured.last()["tokens"]);
  EXPECT_TRUE(read_all(path("model.sqz")) == read_all(path("capture.sqz")));

  const std::vector<std::string> pre = {"capture",    "--model", kModel,        text,
                                        "--pre-rope", "-o",      path("pre.h5")};
  ASSERT_EQ(run(kIndex, pre).code, 0);
  const ToolRun refused =
      run(kIndex, {"build", "--capture", path("pre.h5"), "-o", path("pre.sqz")});
  EXPECT_EQ(refused.code, 3);
  EXPECT_THAT(refused.err, HasSubstr("before RoPE"));
}

TEST_F(ModelToolsTest, TextsFoldersStandardInputAndIdsAreTheSameContext) {
  const std::string first = prose(400), second = "An appendix.\n" + prose(200);
  text_file("docs/a.txt", first);
  text_file("docs/b/c.txt", second);
  text_file("docs/.hidden", "never read");
  text_file("docs/image.bin", std::string("\x89PNG\0\0", 6));
  const ToolRun folder = build("folder.sqz", {path("docs")});
  ASSERT_EQ(folder.code, 0) << folder.err;
  EXPECT_THAT(folder.err, HasSubstr("image.bin: not a text file"));
  ASSERT_EQ(build("files.sqz", {path("docs/a.txt"), path("docs/b/c.txt")}).code, 0);
  EXPECT_TRUE(read_all(path("folder.sqz")) == read_all(path("files.sqz")));
  ASSERT_EQ(build("stdin.sqz", {"-", path("docs/b/c.txt")}, first).code, 0);
  EXPECT_TRUE(read_all(path("stdin.sqz")) == read_all(path("files.sqz")));

  // The special tokens once at the start, the rest file by file.
  const auto tokenizer = Tokenizer::load(kModel).value();
  std::vector<int32_t> ids;
  ASSERT_TRUE(tokenizer->encode(first, true, ids).ok());
  EXPECT_EQ(ids.front(), tokenizer->bos_token());
  ASSERT_TRUE(tokenizer->encode(second, false, ids).ok());
  ASSERT_TRUE(testing::write_npy_tokens(Env::posix(), path("ids.npy"), ids, false).ok());
  const ToolRun given = build("ids.sqz", {"--tokens", path("ids.npy")});
  ASSERT_EQ(given.code, 0) << given.err;
  const Json by_ids = run(kIndex, {"info", path("ids.sqz"), "--json"}).last();
  const Json by_text = run(kIndex, {"info", path("files.sqz"), "--json"}).last();
  EXPECT_EQ(by_ids["tokens_hash"], by_text["tokens_hash"]);
  EXPECT_EQ(by_ids["tokenizer_hash"], "");
  EXPECT_EQ(by_text["tokenizer_hash"], tokenizer->hash());
  const Json cut = build("cut.sqz", {path("docs"), "--max-tokens", "300"}).last();
  EXPECT_EQ(cut["tokens"], 300);
}

TEST_F(ModelToolsTest, SeparateBuildsOneIndexADocument) {
  text_file("docs/a.txt", prose(300));
  text_file("docs/b/c.txt", prose(400));
  const ToolRun built = build("out", {path("docs"), "--separate"});
  ASSERT_EQ(built.code, 0) << built.err;
  EXPECT_EQ(built.events().size(), 3u);
  EXPECT_EQ(built.last()["indexes"].size(), 2u);
  for (const char* name : {"out/a.txt.sqz", "out/b/c.txt.sqz"}) {
    EXPECT_EQ(run(kIndex, {"verify", path(name)}).code, 0) << name;
  }
  EXPECT_EQ(build("out", {path("docs"), "--separate"}).code, 1);  // they exist
}

TEST_F(ModelToolsTest, DryRunNeedsNoModelRunAndKnowsTheSize) {
  const std::string text = text_file("a.txt", prose(500));
  const Json plan = build("a.sqz", {text, "--dry-run"}).last();
  EXPECT_FALSE(fs::exists(path("a.sqz")));
  const Json built = build("a.sqz", {text}).last();
  EXPECT_EQ(plan["bytes"], built["bytes"]);
  EXPECT_EQ(plan["bytes"], fs::file_size(path("a.sqz")));
  EXPECT_EQ(plan["tokens"], built["tokens"]);
}

TEST_F(ModelToolsTest, RefusesTextsThatMakeNoContext) {
  expect_refused(build("x.sqz", {text_file("empty.txt", "")}), 3, "empty.txt");
  expect_refused(build("x.sqz", {text_file("bad.txt", "good until here \xff then not")}), 3,
                 "bad.txt");
  expect_refused(build("x.sqz", {text_file("nul.txt", std::string("a\0b", 3))}), 3, "nul.txt");
  expect_refused(build("x.sqz", {path("missing.txt")}), 3, "missing.txt");
  fs::create_directories(path("void"));
  expect_refused(build("x.sqz", {path("void")}), 3, "no text file");
  expect_refused(build("x.sqz", {text_file("short.txt", "too short")}), 2, "tokens");
  const ToolRun longer = build("x.sqz", {text_file("long.txt", prose(40000))});
  expect_refused(longer, 3, "32768 positions");
  EXPECT_THAT(longer.err, HasSubstr("--max-tokens"));
  std::vector<int32_t> ids(500, 1);
  ids[77] = 8192;
  ASSERT_TRUE(testing::write_npy_tokens(Env::posix(), path("ids.npy"), ids, false).ok());
  const ToolRun foreign = build("x.sqz", {"--tokens", path("ids.npy")});
  expect_refused(foreign, 3, "id 8192");
  EXPECT_THAT(foreign.err, HasSubstr("8192 entries"));
  EXPECT_THAT(foreign.err, HasSubstr("ids.npy"));
}

TEST_F(ModelToolsTest, RefusesAnIndexOfAnotherModelOrTokenizer) {
  ASSERT_EQ(build("a.sqz", {text_file("a.txt", prose(400))}).code, 0);
  const auto copy_model = [&](const std::string& name) {
    fs::copy(kModel, path(name));
    return path(name);
  };
  const auto ask = [&](const std::string& model) {
    return run(kGenerate, {"--model", model, "--index", path("a.sqz"), "--prompt", "x"});
  };
  const std::string theta = copy_model("theta");
  std::string config = read_all(theta + "/config.json");
  config.replace(config.find("500000.0"), 8, "400000.0");
  write_all(theta + "/config.json", config);
  const ToolRun other_model = ask(theta);
  EXPECT_EQ(other_model.code, 3) << other_model.err;
  EXPECT_THAT(other_model.err, HasSubstr("rope.theta"));
  const std::string tokenizer = copy_model("tokenizer");
  write_all(tokenizer + "/tokenizer.json", read_all(tokenizer + "/tokenizer.json") + "\n");
  const ToolRun other_tokenizer = ask(tokenizer);
  EXPECT_EQ(other_tokenizer.code, 3) << other_tokenizer.err;
  EXPECT_THAT(other_tokenizer.err, HasSubstr("tokenizer"));
}

TEST_F(ModelToolsTest, GenerateRefusesWhatItCannotServe) {
  const std::string text = text_file("a.txt", prose(400));
  ASSERT_EQ(build("a.sqz", {text}).code, 0);
  EXPECT_EQ(generate("none.sqz", {"--prompt", "x"}).code, 3);
  EXPECT_EQ(generate("a.sqz", {}, "\n\n").code, 2);  // no prompt at all
  const ToolRun bytes = generate("a.sqz", {"--prompts", text_file("p.txt", "good\n\xff\n")});
  EXPECT_EQ(bytes.code, 3);
  EXPECT_THAT(bytes.err, HasSubstr("p.txt: line 2: text: not valid UTF-8 at byte 0"));
  EXPECT_EQ(generate("a.sqz", {"--prompt", "x", "--budget", "0.1", "--sparsity", "0.9"}).code, 2);
  EXPECT_EQ(generate("a.sqz", {"--prompt", "x", "--budget", "1.5"}).code, 2);
  EXPECT_EQ(generate("a.sqz", {"--prompt", "x", "--threshold", "0.1", "--levels", "2"}).code, 2);
  EXPECT_EQ(generate("a.sqz", {"--prompt", "x", "--selector", "magic"}).code, 2);
  for (const auto& [option, value] : {std::pair("--budget", "0.1"),
                                      {"--sparsity", "0.9"},
                                      {"--threshold", "0.1"},
                                      {"--mass", "0.9"},
                                      {"--levels", "1"},
                                      {"--selector", "squeezed"}}) {
    const ToolRun dense = generate("a.sqz", {"-p", "x", "--dense", option, value});
    EXPECT_EQ(dense.code, 2);
    EXPECT_THAT(dense.err, HasSubstr(concat(option, ": --dense reads everything")));
  }
  const std::vector<std::string> named = {"-p", "x", "--max-tokens", "1", "--selector", "dense"};
  EXPECT_EQ(generate("a.sqz", named).code, 0);
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{"--budget", "0.1"}, {"--lossless"}}) {
    std::vector<std::string> both = named;
    both.insert(both.end(), more.begin(), more.end());
    const ToolRun refused = generate("a.sqz", both);
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr("--selector dense"));
  }
  // A variable is for every run, and says nothing where it is of no use.
  EXPECT_EQ(
      run(kGenerate, {"-m", kModel, "-i", path("a.sqz"), "-p", "x", "--max-tokens", "1", "--dense"},
          "", {"SQZ_BUDGET=0.1"})
          .code,
      0);
  EXPECT_EQ(run(kGenerate, {"--version"}).out, "sqz-generate " SQZ_VERSION "\n");
  EXPECT_THAT(run(kGenerate, {"--help"}).out, HasSubstr("Exit codes: 0 ok"));
}

TEST_F(ModelToolsTest, AChatTemplateIsNotAppliedAndItIsSaid) {
  const std::string text = text_file("a.txt", prose(400));
  fs::copy(kModel, path("chat"));
  const std::string says = "chat: the model has a chat template, which is not applied";
  const auto warned = [&] {
    const ToolRun built =
        run(kIndex, {"build", "-m", path("chat"), text, "-o", path("a.sqz"), "--dry-run"});
    EXPECT_EQ(built.code, 0) << built.err;
    return built.err.find(says) != std::string::npos;
  };
  EXPECT_FALSE(warned());
  write_all(path("chat/tokenizer_config.json"), R"({"chat_template": null})");
  EXPECT_FALSE(warned());
  write_all(path("chat/tokenizer_config.json"), R"({"chat_template": "{{ messages }}"})");
  EXPECT_TRUE(warned());
  write_all(path("chat/tokenizer_config.json"), "{}");
  write_all(path("chat/chat_template.jinja"), "{{ messages }}");
  EXPECT_TRUE(warned());
  ASSERT_EQ(build("a.sqz", {text}).code, 0);
  const ToolRun answer =
      run(kGenerate, {"-m", path("chat"), "-i", path("a.sqz"), "-p", "x", "--max-tokens", "1"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_THAT(answer.err, HasSubstr(says));
}

TEST_F(ModelToolsTest, ServesEveryKindOfIndexWithoutASelector) {
  const std::string text = text_file("a.txt", prose(1500));
  ASSERT_EQ(build("clusters.sqz", {text, "--heavy-hitters"}).code, 0);
  ASSERT_EQ(build("pages.sqz", {text, "--partition", "pages"}).code, 0);
  ASSERT_EQ(run(kIndex, {"prune", path("clusters.sqz"), "--selector", "h2o", "--budget", "0.3",
                         "-o", path("pruned.sqz")})
                .code,
            0);
  for (const auto& [index, selector, budget] :
       {std::tuple{"clusters.sqz", "squeezed", 0.125}, std::tuple{"pages.sqz", "quest", 0.125},
        std::tuple{"pruned.sqz", "h2o", 0.3}}) {
    const std::vector<std::string> ask = {"-p", "The harbour", "--max-tokens", "4"};
    std::vector<std::string> named = ask;
    named.insert(named.end(), {"--selector", selector, "--budget", concat(budget)});
    const ToolRun own = generate(index, ask), chosen = generate(index, named);
    ASSERT_EQ(own.code, 0) << own.err;
    ASSERT_EQ(chosen.code, 0) << chosen.err;
    EXPECT_EQ(own.last()["tokens"], chosen.last()["tokens"]) << index;
    EXPECT_EQ(own.last()["budget"], chosen.last()["budget"]) << index;
    EXPECT_DOUBLE_EQ(own.last()["budget"]["asked"], budget) << index;
  }
  // Thresholds of the context's own tokens deliver another budget: the remedy is named.
  const ToolRun off = generate("clusters.sqz", {"-p", "The harbour", "--rule", "threshold"});
  const Json delivered = off.last()["budget"];
  EXPECT_EQ(off.err.find("sqz-index calibrate") != std::string::npos,
            std::abs(delivered["delivered"].get<double>() / 0.125 - 1) > 0.05)
      << off.err;
}

TEST_F(ModelToolsTest, SaysWhatWasAskedFor) {
  ASSERT_EQ(build("a.sqz", {text_file("a.txt", prose(700))}).code, 0);
  const auto asked = [&](std::vector<std::string> more, const std::string& says) {
    more.insert(more.end(), {"-p", "x", "--max-tokens", "1"});
    const ToolRun answer = generate("a.sqz", more);
    EXPECT_EQ(answer.code, 0) << answer.err;
    EXPECT_THAT(answer.err, HasSubstr("(asked for " + says + ")"));
    return answer.last();
  };
  asked({"--threshold", "0.01,0.001"}, "thresholds of 0.01, 0.001");
  const Json mass = asked({"--mass", "0.8"}, "a mass of 0.8");
  EXPECT_EQ(mass["budget"]["asked"], 0.0);
  EXPECT_EQ(mass["mass"]["asked"], 0.8);
  EXPECT_GE(mass["mass"]["estimated"], 0.8);
  // All keys are read without the centroids that would choose them.
  const Json all = asked({"--sparsity", "0"}, "100 %");
  EXPECT_EQ(all["budget"], Json({{"asked", 1.0}, {"delivered", 1.0}}));
  EXPECT_FALSE(all.contains("mass"));
}

TEST_F(ModelToolsTest, SaysWhyAllOfAShortContextIsRead) {
  ASSERT_EQ(build("a.sqz", {text_file("a.txt", prose(700)), "--tail", "300"}).code, 0);
  const ToolRun answer = generate("a.sqz", {"-p", "x", "--budget", "0.1", "--max-tokens", "1"});
  ASSERT_EQ(answer.code, 0) << answer.err;
  EXPECT_TRUE(answer.last()["dense_fallback"]);
  EXPECT_THAT(answer.err,
              HasSubstr("read 100 % of the fixed context (asked for 10 %; the least is"));
  EXPECT_THAT(answer.err, HasSubstr("first 16 and last 300 of its"));
}

TEST_F(ModelToolsTest, TakesSeveralPromptsAndStreamsIntoAPipe) {
  ASSERT_EQ(build("a.sqz", {text_file("a.txt", prose(400))}).code, 0);
  const std::vector<std::string> common = {"-m", kModel, "-i", path("a.sqz"), "--max-tokens", "8"};
  std::vector<std::string> both = common, one = common, other = common;
  both.insert(both.end(), {"-p", "The sea", "-p", "A road"});
  one.insert(one.end(), {"-p", "The sea"});
  other.insert(other.end(), {"-p", "A road"});
  const ToolRun first = run(kGenerate, one), second = run(kGenerate, other);
  const ToolRun answered = run(kGenerate, both);
  ASSERT_EQ(answered.code, 0) << answered.err;
  EXPECT_EQ(answered.out, first.out + second.out);
  both.emplace_back("--json");
  const Json last = run(kGenerate, both).last();
  ASSERT_EQ(last["answers"].size(), 2u);
  EXPECT_EQ(last["answers"][1]["prompt"], "A road");
  EXPECT_EQ(last["answers"][1]["text"].get<std::string>() + "\n", second.out);
  // Standard output is a file here: a part of the answer is there while the rest is being made.
  bool partly = false;
  std::vector<std::string> longer = one;
  longer[5] = "80";
  run(kGenerate, longer, "", {}, [&](pid_t child) {
    signal_when(child, 0, [&] {
      const std::string out = read_all(folder_ / "stdout");
      return partly = !out.empty() && !out.ends_with('\n');
    });
  });
  EXPECT_TRUE(partly);
}

TEST_F(ModelToolsTest, TogetherOrOneAfterTheOtherGivesTheSameAnswers) {
  ASSERT_EQ(build("a.sqz", {text_file("a.txt", haystack())}).code, 0);
  std::string lines, asked;
  for (const Needle& needle : kNeedles) {
    lines += question(needle) + "\n";
    asked += Json({{"prompt", question(needle)}, {"id", 7}}).dump() + "\n";
  }
  const std::string prompts = text_file("q.jsonl", asked);
  const ToolRun alone = generate("a.sqz", {"--max-tokens", "6"}, lines);
  ASSERT_EQ(alone.code, 0) << alone.err;
  const Json expected = alone.last()["answers"];
  ASSERT_EQ(expected.size(), std::size(kNeedles));
  // Fewer at once than there are, as many, and more; from standard input and from a file.
  for (const std::string width : {"2", "3", "9"}) {
    const ToolRun together =
        width == "2"
            ? generate("a.sqz", {"--max-tokens", "6", "--batch", width}, lines)
            : generate("a.sqz", {"--max-tokens", "6", "--batch", width, "--prompts", prompts});
    ASSERT_EQ(together.code, 0) << together.err;
    const Json last = together.last();
    ASSERT_EQ(last["answers"].size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(last["answers"][i]["index"], i);
      EXPECT_EQ(last["answers"][i]["tokens"], expected[i]["tokens"]) << width << ", " << i;
    }
    EXPECT_GT(last["tokens_per_second"], 0);
  }
  // - is standard input here, too.
  const ToolRun dash = generate("a.sqz", {"--max-tokens", "6", "--batch", "2", "-p", "-"}, lines);
  EXPECT_EQ(dash.last()["answers"].size(), expected.size());
  const ToolRun mixed = generate("a.sqz", {"--batch", "2", "-p", "-", "-p", "x"}, lines);
  EXPECT_EQ(mixed.code, 2);
  EXPECT_THAT(mixed.err, HasSubstr("--prompt -: with --batch it must be the only prompt"));
  // Text is in the order of the prompts.
  const std::vector<std::string> text = {"-m", kModel,   "-i",  path("a.sqz"), "--max-tokens", "6",
                                         "-e", "--stop", "\\n", "--prompts",   prompts};
  std::vector<std::string> batch = text;
  batch.insert(batch.end(), {"--batch", "3"});
  EXPECT_EQ(run(kGenerate, batch).out, run(kGenerate, text).out);
}

TEST_F(ModelToolsTest, LosslessSaysWhatDenseSays) {
  ASSERT_EQ(build("a.sqz", {text_file("a.txt", haystack())}).code, 0);
  const std::vector<std::string> ask = {"-p", question(kNeedles[0]), "--max-tokens", "12"};
  std::vector<std::string> dense = ask, checked = ask, both = ask;
  dense.emplace_back("--dense");
  checked.insert(checked.end(), {"--lossless", "--budget", "0.1"});
  both.insert(both.end(), {"--lossless", "--batch", "2"});
  const ToolRun drafted = generate("a.sqz", checked);
  ASSERT_EQ(drafted.code, 0) << drafted.err;
  const Json answer = drafted.last();
  EXPECT_EQ(answer["tokens"], generate("a.sqz", dense).last()["tokens"]);
  EXPECT_GT(answer["drafts"]["tokens"], 0);
  EXPECT_LE(answer["drafts"]["accepted"], answer["drafts"]["tokens"]);
  const ToolRun refused = generate("a.sqz", both);
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--lossless: found --batch, --dense or --selector dense"));
  EXPECT_THAT(drafted.err, HasSubstr("drafts read "));
}

TEST_F(ModelToolsTest, AnInterruptedBuildLeavesNothing) {
  const std::string text = text_file("a.txt", prose(16000));
  for (const auto& [output, what] : {std::pair{"a.sqz", "build"}, std::pair{"a.h5", "capture"}}) {
    const ToolRun stopped =
        run(kIndex, {what, "--model", kModel, text, "-o", path(output), "--progress"}, "", {},
            [&](pid_t child) { signal_when(child, SIGINT, [&] { return has_spoken(); }); });
    EXPECT_EQ(stopped.code, 130) << stopped.err;
    EXPECT_EQ(files(), "a.txt\n");
  }
}

}  // namespace
}  // namespace sqz
