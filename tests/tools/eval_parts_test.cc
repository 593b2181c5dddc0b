// The parts of sqz-eval: facts, plans, passes, views, figures and settings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tests/common/json.h"
#include "tests/common/must.h"
#include "tools/common/metrics.h"
#include "tools/sqz_eval/settings.h"
#include "tools/sqz_eval/trials.h"

namespace sqz::eval {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

size_t count_of(const std::string& text, const std::string& part) {
  size_t out = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++out;
  return out;
}

class EvalTrials : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    tokenizer_ = must(Tokenizer::load(SQZ_SOURCE_DIR "/examples/models/nano"));
    std::string text;
    for (int line = 0; line < 1500; ++line) {
      text += concat("On day ", line % 97, " the carrier walked to the mill and back.\n");
    }
    haystack_ = {"lines", {}};
    ASSERT_TRUE(tokenizer_->encode(text, false, haystack_.tokens).ok());
  }

  static TrialOptions options(int64_t tokens, int64_t trials, uint64_t seed = 7) {
    TrialOptions out;
    out.tokens = tokens;
    out.tasks = {kNeedle1};
    out.trials = trials;
    out.continuation = 256;
    out.seed = seed;
    return out;
  }

  static Result<Pass> pass_of(const TrialOptions& wanted, int64_t number = 0) {
    return make_pass(*tokenizer_, haystack_, plan_passes(wanted).at(0), wanted, number);
  }

  static std::string decode(const std::vector<int32_t>& ids) {
    return tokenizer_->decode(ids).value();
  }

  inline static std::unique_ptr<Tokenizer> tokenizer_;
  inline static TokenText haystack_;
};

TEST_F(EvalTrials, PassHasTheLengthAskedAndFactsAllOverIt) {
  const TrialOptions wanted = options(16000, 6);
  const Pass pass = *pass_of(wanted);
  EXPECT_EQ(pass.ids.size(), 16000u);
  EXPECT_EQ(pass.continuation.size(), 257u);
  EXPECT_EQ(pass.ids.front(), *tokenizer_->bos_token());
  ASSERT_EQ(pass.facts.size(), 6u);
  std::vector<int64_t> places;
  for (size_t i = 0; i < pass.facts.size(); ++i) {
    const Range& range = pass.planted[i];
    EXPECT_GE(range.first, wanted.sink);
    EXPECT_LE(range.first + range.count, wanted.tokens - wanted.tail);
    const auto begin = pass.ids.begin() + range.first;
    EXPECT_EQ(decode({begin, begin + range.count}), pass.facts[i].text);
    EXPECT_TRUE(decode({begin - 1, begin}).ends_with('\n'));
    places.push_back(range.first);
  }
  std::sort(places.begin(), places.end());
  constexpr int64_t kSlack = 300;  // sink, tail, facts before, the next line's end
  for (int64_t i = 0; i < 6; ++i) {
    EXPECT_GE(places[static_cast<size_t>(i)], i * 16000 / 6 - kSlack);
    EXPECT_LE(places[static_cast<size_t>(i)], (i + 1) * 16000 / 6 + kSlack);
  }
}

TEST_F(EvalTrials, TextIsTheHaystackWithoutTheFacts) {
  const Pass pass = *pass_of(options(2000, 1));
  const Range& range = pass.planted.at(0);
  std::vector<int32_t> rest(pass.ids.begin() + 1, pass.ids.end());
  rest.erase(rest.begin() + range.first - 1, rest.begin() + range.first - 1 + range.count);
  rest.insert(rest.end(), pass.continuation.begin(), pass.continuation.end());
  EXPECT_NE(std::search(haystack_.tokens.begin(), haystack_.tokens.end(), rest.begin(), rest.end()),
            haystack_.tokens.end());
}

TEST_F(EvalTrials, ViewShowsItsOwnFactAndThoseThatCalibrate) {
  TrialOptions wanted = options(16000, 6);
  wanted.calibration = 5;
  const Pass pass = *pass_of(wanted);
  ASSERT_EQ(pass.views.size(), 6u);
  ASSERT_EQ(pass.facts.size(), 11u);
  for (size_t v = 0; v < 6; ++v) {
    const auto ids = view_ids(pass, pass.views[v]);
    const std::string text = decode(ids);
    for (size_t i = 0; i < pass.facts.size(); ++i) {
      const size_t times = i == v || i >= 6 ? 1 : 0;
      EXPECT_EQ(count_of(text, pass.facts[i].text), times);
      EXPECT_EQ(count_of(text, pass.facts[i].answer), times);
    }
    EXPECT_GE(static_cast<double>(ids.size()), 16000 * (1 - kMostLeftOut));
  }
}

TEST_F(EvalTrials, SeedAndNumberDecideEverything) {
  const Pass first = *pass_of(options(4000, 2)), again = *pass_of(options(4000, 2));
  EXPECT_EQ(first.ids, again.ids);
  EXPECT_EQ(first.continuation, again.continuation);
  EXPECT_NE(first.ids, pass_of(options(4000, 2), 1)->ids);
  EXPECT_NE(first.ids, pass_of(options(4000, 2, 8))->ids);
}

TEST_F(EvalTrials, PlanHasTheTrialsAsked) {
  struct Case {
    int64_t tokens, share, trials;
    std::vector<std::string> tasks;
    int64_t questions, texts, passes;
  };
  const std::vector<std::string> all = {kNeedle1, kLoss, kError};
  for (const Case& one : std::vector<Case>{{2000, 8, 30, all, 30, 15, 30},
                                           {8000, 8, 30, all, 30, 15, 15},
                                           {31000, 8, 30, all, 30, 15, 15},
                                           {31000, 8, 30, {kNeedle1}, 30, 0, 4},
                                           {31000, 8, 30, {kLoss}, 0, 15, 15},
                                           {31000, 1, 5, {kRecall}, 5, 3, 5}}) {
    TrialOptions wanted = options(one.tokens, one.trials);
    wanted.tasks = one.tasks;
    wanted.share = one.share;
    const auto shapes = plan_passes(wanted);
    int64_t questions = 0, texts = 0;
    for (const PassShape& shape : shapes) {
      EXPECT_LE(shape.views, one.share);
      if (shape.questions) questions += shape.views;
      texts += shape.text ? 1 : 0;
    }
    EXPECT_EQ(questions, one.questions) << one.tokens;
    EXPECT_EQ(texts, one.texts) << one.tokens;  // 2 blocks of 128 each
    EXPECT_EQ(std::ssize(shapes), one.passes) << one.tokens;
  }
}

TEST_F(EvalTrials, TextThatIsTooShortIsRefused) {
  EXPECT_THAT(pass_of(options(500000, 1)).status().message(), HasSubstr("lines: the text has "));
  EXPECT_THAT(pass_of(options(150, 1)).status().message(), HasSubstr("no room"));
}

TEST(EvalFacts, AnswerCountsOnlyWhole) {
  const Fact fact{"", "", "1234"};
  for (const auto& [text, right, done] : {std::tuple(" 1234", true, false),  // a digit may follow
                                          {" 1234.\n", true, true},
                                          {" 12345", false, true},
                                          {" 123", false, false},
                                          {"1234", false, true},
                                          {" 129", false, true}}) {
    EXPECT_EQ(answers(fact, text), right) << text;
    EXPECT_EQ(decided(fact, text), done) << text;
  }
}

TEST(EvalFacts, AnswersDifferAndAreNotInTheText) {
  Random random(3);
  std::string text;
  for (int i = 1000; i < 10000; i += 2) text += concat(i, " ");  // every even number of 4 digits
  const auto facts = random_facts(random, kMostFacts + kMostCalibrationFacts, text);
  std::set<std::string> prompts;
  for (const Fact& fact : facts) {
    prompts.insert(fact.prompt);
    EXPECT_EQ(text.find(fact.answer), std::string::npos);
    for (const Fact& other : facts) {
      EXPECT_TRUE(&other == &fact || other.answer.find(fact.answer) == std::string::npos);
    }
  }
  EXPECT_EQ(prompts.size(), 64u);
}

TEST(EvalFacts, ATextMayHaveEveryNumberOfFourDigits) {
  Random random(3);
  std::string text;
  for (int i = 1000; i < 10000; ++i) text += concat(i, " ");
  for (const Fact& fact : random_facts(random, kMostFacts, text)) {
    EXPECT_EQ(text.find(fact.answer), std::string::npos);
  }
}

TEST(Metrics, AreThoseComputedByHand) {
  const std::vector<double> four = {1, 2, 3, 6}, ones = {1, 1, 1, 1};
  EXPECT_DOUBLE_EQ(mean(four), 3);
  EXPECT_DOUBLE_EQ(standard_error(four), std::sqrt(14.0 / 3 / 4));  // squares 4 + 1 + 0 + 9
  EXPECT_EQ(standard_error(std::span(four).first(1)), 0);
  EXPECT_DOUBLE_EQ(binomial_error(0.75, 48), 0.0625);
  EXPECT_THAT(difference(four, ones), ElementsAre(0, 1, 2, 5));
  const std::vector<double> values = {1, 3, 5, 9, 100};
  EXPECT_THAT(block_means(values, 2), ElementsAre(2, 7));
  EXPECT_THAT(block_means(values, 6), ElementsAre(23.6));
  EXPECT_TRUE(block_means({}, 2).empty());
  const std::vector<float> dense = {3, 4}, sparse = {3, 3}, zero = {0, 0};
  EXPECT_DOUBLE_EQ(relative_error(sparse, dense), 0.2);
  EXPECT_EQ(relative_error(zero, zero), 0);
  EXPECT_TRUE(std::isinf(relative_error(dense, zero)));
  EXPECT_NEAR(recalled_mass(std::log(3.0f), std::log(4.0f)), 0.75, 1e-6);
  EXPECT_EQ(recalled_mass(kNothing, 1), 0);
  EXPECT_EQ(recalled_mass(kNothing, kNothing), 1);
}

TEST(Metrics, MergedAttentionIsOneSoftmax) {
  // Keys with logits log 1 and log 3 and values 4 and 8: 1/4 * 4 + 3/4 * 8 = 7.
  const std::vector<float> out = {4, 8, 1, 1, 1, 1}, lse = {0, kNothing, kNothing};
  const std::vector<float> own = {8, 4, 2, 3, 1, 1}, own_lse = {std::log(3.0f), 500, kNothing};
  const ObservedAttention seen = {
      .count = 1, .heads = 3, .dim = 2, .own_out = own.data(), .own_lse = own_lse.data()};
  const auto merged = merged_attention(seen, out.data(), lse.data());
  EXPECT_THAT(merged, ::testing::Pointwise(::testing::FloatNear(1e-5f),
                                           std::vector<float>{7, 5, 2, 3, 0, 0}));
}

TEST(Metrics, ReadsAddUp) {
  Reads reads;
  EXPECT_EQ(reads.delivered_budget(), 0);
  sqz_stats stats = {};
  stats.asked_budget = 0.125;
  stats.bytes_read = 10;
  stats.bytes_dense = 40;
  stats.keys_read = 1;
  stats.keys_possible = 10;
  reads.add(stats);
  stats.bytes_read = 30;
  stats.dense_fallback = 1;
  reads.add(stats);
  EXPECT_DOUBLE_EQ(reads.delivered_budget(), 0.5);
  EXPECT_DOUBLE_EQ(reads.lowest, 0.25);
  EXPECT_DOUBLE_EQ(reads.highest, 0.75);
  EXPECT_DOUBLE_EQ(reads.delivered_keep(), 0.1);
  EXPECT_EQ(reads.asked_budget, 0.125);
  EXPECT_TRUE(reads.dense_fallback);
}

// A word for each option of a setting that is not the default.
std::vector<std::string> texts_of(const SettingOptions& options) {
  std::vector<std::string> out;
  for (const Setting& setting : make_settings(options)) {
    std::string text = setting.options.selector;
    if (setting.options.budget) text += concat(" ", *setting.options.budget);
    const Json json = Json::parse(JsonText(to_json(setting)).str());
    for (const char* option : {"rows", "levels", "rule", "layers", "dense_layers"}) {
      if (json.contains(option)) text += " " + json[option].dump();
    }
    out.push_back(text);
  }
  return out;
}

TEST(EvalSettings, AreTheCrossProductOfTheOptionsThatASelectorTakes) {
  SettingOptions options;
  options.selectors = {"squeezed", "dense", "squeezed"};
  options.budgets = {0.1, 0.2};
  options.rows = {"bf16", "q8"};
  EXPECT_THAT(texts_of(options), ElementsAre("dense", R"(squeezed 0.1 0 "budget" "uniform")",
                                             R"(squeezed 0.2 0 "budget" "uniform")",
                                             R"(squeezed 0.1 "q8" 0 "budget" "uniform")",
                                             R"(squeezed 0.2 "q8" 0 "budget" "uniform")"));
  options.selectors = {"quest", "stream", "saap"};
  options.budgets = {0.5};
  options.rules = {"threshold", "budget"};
  options.levels = {1, 2};
  options.rows = {"bf16", "q8"};
  options.dense_layers = 0;
  EXPECT_THAT(texts_of(options),
              ElementsAre("dense", R"(quest 0.5 "uniform" 0)", R"(stream 0.5 "uniform" 0)",
                          R"(stream 0.5 "q8" "uniform" 0)", R"(saap 0.5 "uniform" 0)"));
  std::vector<std::string> kinds;
  for (const IndexKind& kind : index_kinds(make_settings(options))) kinds.push_back(kind.name());
  EXPECT_THAT(kinds, ElementsAre("kmeans", "pages", "kmeans-q8", "buckets"));
  options = {};
  options.selectors = {"h2o"};
  options.layers = {"uniform", "a/l.json"};
  EXPECT_THAT(texts_of(options),
              ElementsAre("dense", R"(h2o 0.125 "uniform")", R"(h2o 0.125 "a/l.json")"));
  options = {};
  options.selectors = selector_names();
  EXPECT_EQ(texts_of(options).size(), selector_names().size());
}

// Not of sqz-eval alone: the options of every tool.
TEST(SelectorOptions, BecomeThoseOfASession) {
  for (const std::string& name : selector_names()) {
    SelectorOptions options;
    options.selector = name;
    const sqz_session_options session = session_options(options, 1);
    EXPECT_EQ(sqz_selector_name(static_cast<sqz_selector>(session.selector)), name);
    EXPECT_EQ(session.budget, name == "dense" ? 0 : kDefaultBudget);
    EXPECT_EQ(session.uniform_layers, 0);
  }
  SelectorOptions spread;
  spread.selector = "stream";
  spread.layer_scales = {1, 2, 3};
  EXPECT_EQ(session_options(spread, 1).layer_scales, spread.layer_scales.data());
  EXPECT_EQ(session_options(spread, 1).layer_scale_count, 3);
  SelectorOptions uniform;
  uniform.layers = kUniformLayers;
  uniform.dense_layers = 0;
  EXPECT_EQ(session_options(uniform, 1).uniform_layers, 1);
  EXPECT_EQ(session_options(uniform, 1).dense_layers, -1);
}

}  // namespace
}  // namespace sqz::eval
