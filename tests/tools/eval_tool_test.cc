// sqz-eval from end to end, with the example model and a context of 2000 tokens.
#include <gmock/gmock.h>

#include <cmath>
#include <map>

#include "formats/sqz_file.h"
#include "tests/common/must.h"
#include "tests/tools/run_tool.h"
#include "tools/common/index_context.h"
#include "tools/common/model_options.h"
#include "tools/sqz_eval/judge.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

std::string lines(int count) {
  std::string out;
  for (int line = 0; line < count; ++line) {
    out += concat("On day ", line % 97, " the carrier walked to the mill and back.\n");
  }
  return out;
}

class EvalTool : public ToolTest {
 protected:
  void SetUp() override { write_file(path("lines.txt"), lines(400)); }

  ToolRun eval(std::vector<std::string> more) const {
    more.insert(more.begin(), {"--model", kModel, "--text", path("lines.txt"), "--tokens", "2000",
                               "--continuation", "128"});
    const ToolRun out = run("sqz-eval", more, "", {"TMPDIR=" + path("")});
    EXPECT_EQ(files(), "lines.txt\n") << "no temporary index is left";
    return out;
  }
};

TEST_F(EvalTool, ReadingEverythingIsDense) {
  const ToolRun result = eval({"--trials", "2", "--budget", "1", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  std::map<std::string, int> tasks;
  const Json last = result.last();
  for (const Json& row : last["rows"]) {
    const std::string task = row["task"].get<std::string>() + row.value("on", "");
    ++tasks[task];
    EXPECT_EQ(row["tokens"], 2000);
    EXPECT_EQ(row["budget"]["delivered"], 1.0) << row;
    EXPECT_EQ(row["keep"]["delivered"], 1.0) << row;
    if (row["selector"] == "dense") continue;
    if (row["task"] == "error") {
      EXPECT_EQ(row["value"], 0.0);
    } else if (row["task"] == "recall") {
      EXPECT_EQ(row["value"], 1.0);
    } else {
      EXPECT_EQ(row["difference"]["value"], 0.0) << row;
    }
    if (row["task"] == "needle1") {
      EXPECT_EQ(row["agreement"]["both"], row["agreement"]["dense"]) << row;
    }
  }
  const std::map<std::string, int> expected = {{"needle1", 2},    {"loss", 2},
                                               {"errortext", 1},  {"errorquestions", 1},
                                               {"recalltext", 1}, {"recallquestions", 1}};
  EXPECT_EQ(tasks, expected);
  Json so_far;
  for (const Json& event : result.events()) {
    if (event["event"] == "pass") so_far = event["rows"];
  }
  EXPECT_EQ(so_far, last["rows"]);
}

TEST_F(EvalTool, TableAndRepetition) {
  const std::vector<std::string> wanted = {"--task", "loss,error", "--trials",
                                           "1",      "--budget",   "0.4,0.6"};
  const ToolRun first = eval(wanted), again = eval(wanted);
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(first.out, again.out);
  EXPECT_THAT(first.out, ::testing::ContainsRegex("error +questions +squeezed +- +- +0 +budget"));
}

TEST_F(EvalTool, CalibratesWithQuestionsOfItsOwn) {
  const auto delivered = [&](const char* prompts) {
    const ToolRun result = eval({"--task", "needle1", "--trials", "2", "--budget", "0.3", "--rule",
                                 "threshold", "--calibrate-prompts", prompts, "--json"});
    EXPECT_EQ(result.code, 0) << result.err;
    return result.last()["rows"][1]["budget"]["delivered"].get<double>();
  };
  const double tail = delivered("0"), prompts = delivered("6");
  EXPECT_NEAR(prompts, 0.3, 0.045);  // 15 %
  EXPECT_LT(std::abs(prompts - 0.3), std::abs(tail - 0.3));
}

TEST_F(EvalTool, EverySelectorFromOneDensePass) {
  const ToolRun result = eval({"--task", "error", "--trials", "1", "--budget", "0.5", "--selector",
                               "squeezed,quest,stream,window,h2o", "--dense-layers", "1", "--rows",
                               "bf16,q8", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  std::map<std::string, int> selectors;
  const Json last = result.last();
  for (const Json& row : last["rows"]) {
    ++selectors[row["selector"].get<std::string>()];
    EXPECT_EQ(row["dense_fallback"], false) << row;
    EXPECT_GT(row["value"], 0.0) << row;
    EXPECT_GT(row["budget"]["delivered"], 0.2) << row;  // one of the layers is read whole
    EXPECT_LT(row["budget"]["delivered"], 1.0) << row;
    EXPECT_EQ(row["dense_layers"], 1) << row;
  }
  const std::map<std::string, int> expected = {
      {"squeezed", 4}, {"quest", 2}, {"stream", 4}, {"window", 4}, {"h2o", 4}};
  EXPECT_EQ(selectors, expected);
}

// Documents that were made apart, each read whole: nearly the loss of the text in one piece.
TEST_F(EvalTool, ComposesDocuments) {
  const ToolRun result =
      eval({"--trials", "2", "--budget", "1", "--selector", "dense", "--compose", "2,3", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  std::map<std::string, double> losses;
  std::string rows;
  const Json last = result.last();
  for (const Json& row : last["rows"]) {
    const std::string documents = concat(row.value("documents", 1));
    rows += concat(row["task"].get<std::string>(), documents, ' ');
    EXPECT_NEAR(row["budget"]["delivered"], 1.0, 0.01) << row;  // without sinks
    if (row["task"] == "loss") losses[documents] = row["value"];
  }
  EXPECT_EQ(rows, "loss1 loss2 loss3 needle11 needle12 needle13 ");
  for (const char* documents : {"2", "3"}) {
    EXPECT_NE(losses[documents], losses["1"]);
    EXPECT_NEAR(losses[documents], losses["1"], 0.1);
  }
}

TEST_F(EvalTool, StoppedItLeavesNothing) {
  const ToolRun stopped = run(
      SQZ_EVAL_TOOL,
      {"--model", kModel, "--text", path("lines.txt"), "--tokens", "2000", "--trials", "8", "-v"},
      "", {"TMPDIR=" + path("")}, [&](pid_t child) {
        signal_when(child, SIGINT, [&] {
          return read_file(folder_ / "stderr").find("measured in") != std::string::npos;
        });
      });
  EXPECT_EQ(stopped.code, 130) << stopped.err;
  EXPECT_EQ(files(), "lines.txt\n");
}

TEST_F(EvalTool, BadInput) {
  const std::string tool = "sqz-eval -m $MODEL --text lines.txt ", eval = tool + "--tokens 2000 ";
  expect_all({{eval + "--selector psychic", 2, {"psychic"}},
              {eval + "--selector saap", 2, {"--qmodel"}},
              {eval + "--qmodel q.sqz", 2, {"--selector saap"}},
              {eval + "--layers none.json", 3, {"none.json"}},
              {eval + "--layers lines.txt", 3, {"lines.txt"}},
              {eval + "--task juggling", 2, {"--task"}},
              {eval + "--dense-layers 7", 2, {"--dense-layers: found 7, expected 0 to 6"}},
              {eval + "--compose 9", 2, {"--compose"}},
              {eval + "--levels 1,3", 2, {"--levels: found 3, expected 0 to 2"}},
              {tool + "--tokens 40000", 2, {"positions"}},
              {tool + "--tokens 20000", 2, {"lines.txt: the text has"}},
              {eval + "--text none.txt", 3, {"none.txt"}},
              {eval + "--calibrate-prompts 100", 2, {"--calibrate-prompts"}},
              {eval + "--device cuda", 2, {"device"}}});
}

}  // namespace

namespace eval {
namespace {

// A context that changes the answers of another one: out * scale, lse + shift.
class ChangedContext final : public FixedContext {
 public:
  ChangedContext(FixedContext& inner, float scale, float shift)
      : inner_(inner), scale_(scale), shift_(shift) {}

  int64_t tokens() const override { return inner_.tokens(); }
  Status attend(int64_t layer, const ContextQueries& queries) override {
    SQZ_RETURN_IF_ERROR(inner_.attend(layer, queries));
    const int64_t rows = queries.indptr.back() * queries.heads;
    for (int64_t i = 0; i < rows * queries.dim; ++i) static_cast<float*>(queries.out)[i] *= scale_;
    for (int64_t i = 0; i < rows; ++i) queries.lse[i] += shift_;
    return {};
  }

 private:
  FixedContext& inner_;
  float scale_, shift_;
};

// The views of one pass with two facts, and a view of the whole pass.
TEST(EvalProbe, IndexesAndErrorsOfAPass) {
  constexpr int64_t kTokens = 1200;
  RunnerOptions one_thread;
  one_thread.threads = 1;
  EvalModel model{Runner::load(kModel, one_thread).value(), Tokenizer::load(kModel).value()};
  TokenText haystack{"lines", {}};
  ASSERT_TRUE(model.tokenizer->encode(lines(150), false, haystack.tokens).ok());
  TrialOptions trials;
  trials.tokens = kTokens;
  trials.continuation = 128;
  Pass pass = must(make_pass(*model.tokenizer, haystack, {2, true, true}, trials, 0));
  pass.views.push_back({{{0, kTokens}}, false, false});
  pass.facts.emplace_back();
  BuildOptions build;
  build.threads = 1;
  build.iterations = 2;
  PassIndexes indexes;
  const Status built = indexes.make(model, pass, {{Partition::kKmeans}}, build, [](double) {});
  ASSERT_TRUE(built.ok()) << built.message();
  for (size_t v = 0; v < 2; ++v) {
    const auto file = must(SqzFile::open(indexes.file(v, {}, 0).name.path()));
    EXPECT_EQ(file->metadata().tokens, kTokens - pass.planted[1 - v].count);
  }

  // Known changes have known errors, and a run with a probe answers as one without.
  const auto open = [&](size_t view, const char* selector) {
    SelectorOptions selection;
    selection.selector = selector;
    selection.keep = 0.1;
    return IndexContext::open(indexes.file(view, {}, 0).name.path(), session_options(selection, 1))
        .value();
  };
  const auto dense = open(0, "dense"), same = open(0, "dense"), squeezed = open(0, "squeezed");
  ChangedContext half(*same, 1, -std::log(2.0f));
  ChangedContext nothing(*same, 0, -INFINITY);
  Probe probe({same.get(), &half, &nothing, squeezed.get()}, 128);
  ScoreOptions options;
  options.observer = [&](const ObservedAttention& attention) { return probe.observe(attention); };
  dense->place(kTokens);
  const auto losses = must(model.runner->score(pass.continuation, *dense, options));
  EXPECT_EQ(losses, *model.runner->score(pass.continuation, *dense, {}));
  const auto results = probe.results();
  for (size_t t = 0; t < 128; ++t) {
    EXPECT_EQ(results[0].error[t], 0);
    EXPECT_EQ(results[0].recall[t], 1);
    EXPECT_GT(results[1].error[t], 0);
    EXPECT_NEAR(results[1].recall[t], 0.5, 1e-5);
    EXPECT_GT(results[2].error[t], results[1].error[t]);
    EXPECT_EQ(results[2].recall[t], 0);
    EXPECT_GT(results[3].recall[t], 0);
    EXPECT_LE(results[3].recall[t], 1 + 1e-5);
  }

  // Attention behind the index of the whole text is attention to the whole text.
  const auto whole = open(2, "dense");
  const auto behind = must(model.runner->score(pass.continuation, *whole, {}));
  std::vector<int32_t> all = pass.ids;
  all.insert(all.end(), pass.continuation.begin(), pass.continuation.end());
  std::vector<float> logits;
  GenerateOptions once;
  once.max_tokens = 0;
  ASSERT_TRUE(model.runner->generate(all, once, nullptr, &logits).ok());
  const auto vocabulary = static_cast<size_t>(model.description().vocab_size);
  for (size_t t = 0; t < behind.size(); ++t) {
    double sum = 0;
    const float* row = logits.data() + (static_cast<size_t>(kTokens) + t) * vocabulary;
    for (size_t i = 0; i < vocabulary; ++i) sum += std::exp(static_cast<double>(row[i]));
    const double expected = std::log(sum) - row[pass.continuation[t + 1]];
    EXPECT_NEAR(behind[t], expected, 0.05) << t;  // keys and values in the index are bf16
  }
}

TEST(EvalProbe, RowsOfAView) {
  // Rows of two heads of four tokens, two numbers each, without token 1.
  std::vector<float> rows(16);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  EXPECT_THAT(visible_rows(rows, {{{0, 1}, {2, 2}}, false, false}, 2, 4, 2),
              ::testing::ElementsAre(0, 1, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15));
}

}  // namespace
}  // namespace eval
}  // namespace sqz
