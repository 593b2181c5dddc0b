// The trial generator of sqz-eval: facts, plans, passes and views.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "formats/base/file.h"
#include "tools/sqz_eval/trials.h"

namespace sqz::eval {
namespace {

using ::testing::HasSubstr;

size_t count_of(const std::string& text, const std::string& part) {
  size_t out = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++out;
  return out;
}

class EvalTrials : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto loaded = Tokenizer::load(SQZ_SOURCE_DIR "/examples/models/nano");
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    tokenizer_ = std::move(loaded).value().release();
    haystack_ = new Haystack{"lines", {}};
    std::string text;
    for (int line = 0; line < 1500; ++line) {
      text += concat("On day ", line % 97, " the carrier walked to the mill and back.\n");
    }
    ASSERT_TRUE(tokenizer_->encode(text, false, haystack_->ids).ok());
  }

  static TrialOptions options(std::vector<Task> tasks, int64_t tokens, int64_t trials) {
    TrialOptions out;
    out.tokens = tokens;
    out.tasks = std::move(tasks);
    out.trials = trials;
    out.continuation = 256;
    out.seed = 7;
    return out;
  }

  static Pass pass_of(const PassShape& shape, const TrialOptions& wanted, int64_t number = 0) {
    auto made = make_pass(*tokenizer_, *haystack_, shape, wanted, number);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? *made : Pass();
  }

  static std::string decode(const std::vector<int32_t>& ids) {
    auto text = tokenizer_->decode(ids);
    EXPECT_TRUE(text.ok());
    return text.ok() ? *text : "";
  }

  static Tokenizer* tokenizer_;
  static Haystack* haystack_;
};

Tokenizer* EvalTrials::tokenizer_ = nullptr;
Haystack* EvalTrials::haystack_ = nullptr;

TEST_F(EvalTrials, PassHasTheLengthAskedAndFactsWhereItSays) {
  const auto wanted = options({Task::kNeedle1, Task::kPasskey}, 8000, 3);
  const PassShape shape = plan_passes(wanted).at(0);
  ASSERT_EQ(shape.singles, 3);
  const Pass pass = pass_of(shape, wanted);
  EXPECT_EQ(pass.ids.size(), 8000u);
  EXPECT_EQ(pass.continuation.size(), 257u);
  EXPECT_EQ(pass.ids.front(), *tokenizer_->bos_token());
  ASSERT_EQ(pass.facts.size(), 6u);
  for (size_t i = 0; i < pass.facts.size(); ++i) {
    const Range& range = pass.planted[i];
    EXPECT_GE(range.first, wanted.sink);
    EXPECT_LE(range.first + range.count, wanted.tokens - wanted.tail);
    const auto begin = pass.ids.begin() + range.first;
    EXPECT_EQ(decode({begin, begin + range.count}), pass.facts[i].text);
    EXPECT_TRUE(decode({begin - 1, begin}).ends_with('\n'));
  }
}

TEST_F(EvalTrials, TextIsTheHaystackWithoutTheFacts) {
  const auto wanted = options({Task::kNeedle1}, 2000, 1);
  const Pass pass = pass_of(plan_passes(wanted).at(0), wanted);
  const Range& range = pass.planted.at(0);
  std::vector<int32_t> rest(pass.ids.begin() + 1, pass.ids.end());
  rest.erase(rest.begin() + range.first - 1, rest.begin() + range.first - 1 + range.count);
  rest.insert(rest.end(), pass.continuation.begin(), pass.continuation.end());
  EXPECT_NE(std::search(haystack_->ids.begin(), haystack_->ids.end(), rest.begin(), rest.end()),
            haystack_->ids.end());
}

TEST_F(EvalTrials, ViewShowsTheFactsOfItsTrialOnly) {
  const auto wanted = options({Task::kNeedle1, Task::kNeedle4, Task::kPasskey}, 16000, 8);
  const PassShape shape = plan_passes(wanted).at(0);
  ASSERT_EQ(shape.singles, 4);
  ASSERT_EQ(shape.fours, 1);
  const Pass pass = pass_of(shape, wanted);
  for (const View& view : pass.views) {
    const std::string text = decode(view_ids(pass, view));
    std::set<size_t> asked;
    for (const Question& question : view.questions) asked.insert(question.fact);
    EXPECT_EQ(asked.size(), view.name.starts_with("four") ? 4u : 2u);
    for (size_t i = 0; i < pass.facts.size(); ++i) {
      const Fact& fact = pass.facts[i];
      const size_t times = fact.kind == FactKind::kPasskey ? 2 : 1;  // a passkey is said twice
      EXPECT_EQ(count_of(text, fact.text), asked.contains(i) ? 1 : 0) << view.name << fact.text;
      EXPECT_EQ(count_of(text, fact.answer), asked.contains(i) ? times : 0) << fact.answer;
    }
    EXPECT_GE(static_cast<double>(view_ids(pass, view).size()), 16000 * (1 - kMostLeftOut));
  }
}

TEST_F(EvalTrials, FactsThatCalibrateAreInEveryViewAndNeverAsked) {
  auto wanted = options({Task::kNeedle1, Task::kNeedle4, Task::kPasskey}, 16000, 6);
  wanted.calibration = 5;
  const Pass pass = pass_of(plan_passes(wanted).at(0), wanted);
  ASSERT_EQ(pass.facts.size(), pass.calibration + 5);
  std::set<std::string> prompts;
  for (const Fact& fact : pass.facts) {
    if (fact.kind != FactKind::kNeedle) continue;
    EXPECT_TRUE(prompts.insert(fact.prompt).second);
  }
  for (const View& view : pass.views) {
    const std::string text = decode(view_ids(pass, view));
    for (const Question& question : view.questions) EXPECT_LT(question.fact, pass.calibration);
    for (size_t i = pass.calibration; i < pass.facts.size(); ++i) {
      EXPECT_EQ(count_of(text, pass.facts[i].text), 1u) << view.name;
    }
  }
  wanted.calibration = 0;
  EXPECT_EQ(pass_of(plan_passes(wanted).at(0), wanted).calibration, pass.calibration);
}

TEST_F(EvalTrials, SeedDecidesEverything) {
  auto wanted = options({Task::kNeedle1, Task::kPasskey}, 4000, 2);
  const PassShape shape = plan_passes(wanted).at(0);
  const Pass first = pass_of(shape, wanted), again = pass_of(shape, wanted);
  EXPECT_EQ(first.ids, again.ids);
  EXPECT_EQ(first.continuation, again.continuation);
  EXPECT_NE(first.ids, pass_of(shape, wanted, 1).ids);
  wanted.seed = 8;
  EXPECT_NE(first.ids, pass_of(shape, wanted).ids);
}

TEST_F(EvalTrials, DepthsCoverTheContext) {
  const auto wanted = options({Task::kNeedle1}, 16000, 6);
  const Pass pass = pass_of(plan_passes(wanted).at(0), wanted);
  std::vector<int64_t> places;
  for (const Range& range : pass.planted) places.push_back(range.first);
  std::sort(places.begin(), places.end());
  ASSERT_EQ(places.size(), 6u);
  constexpr int64_t kSlack = 300;  // sink, tail, facts before, the next line's end
  for (int64_t i = 0; i < 6; ++i) {
    EXPECT_GE(places[static_cast<size_t>(i)], i * 16000 / 6 - kSlack);
    EXPECT_LE(places[static_cast<size_t>(i)], (i + 1) * 16000 / 6 + kSlack);
  }
}

TEST_F(EvalTrials, PlanHasTheTrialsAsked) {
  for (const int64_t tokens : {2000, 8000, 31000}) {
    const auto wanted = options(
        {Task::kNeedle1, Task::kNeedle4, Task::kPasskey, Task::kLoss, Task::kError}, tokens, 30);
    int64_t singles = 0, fours = 0, texts = 0;
    for (const PassShape& shape : plan_passes(wanted)) {
      EXPECT_GE(shape.needles, std::max(shape.singles, 4 * shape.fours));
      EXPECT_LE(shape.needles, most_facts());
      if (shape.questions) singles += shape.singles;
      fours += shape.fours;
      texts += shape.text ? 1 : 0;
    }
    EXPECT_EQ(singles, 30) << tokens;
    EXPECT_EQ(fours, 8) << tokens;   // 4 questions each
    EXPECT_EQ(texts, 15) << tokens;  // 2 blocks of 128 each
  }
}

TEST_F(EvalTrials, ShareOfOneGivesEachTrialItsPass) {
  auto wanted = options({Task::kNeedle1}, 31000, 5);
  wanted.share = 1;
  const auto shapes = plan_passes(wanted);
  EXPECT_EQ(shapes.size(), 5u);
  for (const PassShape& shape : shapes) EXPECT_EQ(shape.needles, 1);
}

TEST_F(EvalTrials, TextThatIsTooShortIsRefused) {
  const auto wanted = options({Task::kNeedle1}, 500000, 1);
  const auto made = make_pass(*tokenizer_, *haystack_, plan_passes(wanted).at(0), wanted, 0);
  ASSERT_FALSE(made.ok());
  EXPECT_THAT(made.status().message(), HasSubstr("lines: the text has "));
  const auto tiny = options({Task::kNeedle1}, 150, 1);
  const auto crowded = make_pass(*tokenizer_, *haystack_, plan_passes(tiny).at(0), tiny, 0);
  ASSERT_FALSE(crowded.ok());
  EXPECT_THAT(crowded.status().message(), HasSubstr("no room"));
}

TEST(EvalFacts, AnswerCountsOnlyWhole) {
  const Fact fact{FactKind::kNeedle, "", "", "1234"};
  EXPECT_TRUE(answers(fact, " 1234"));
  EXPECT_TRUE(answers(fact, " 1234.\n"));
  EXPECT_FALSE(answers(fact, " 12345"));
  EXPECT_FALSE(answers(fact, " 123"));
  EXPECT_FALSE(answers(fact, "1234"));
  EXPECT_FALSE(decided(fact, " 123"));
  EXPECT_FALSE(decided(fact, " 1234"));  // a digit may follow
  EXPECT_TRUE(decided(fact, " 1234."));
  EXPECT_TRUE(decided(fact, " 129"));
}

TEST(EvalFacts, AnswersDifferAndAreNotInTheText) {
  Random random(3);
  std::string text;
  for (int i = 1000; i < 10000; i += 2) text += concat(i, " ");  // every even number of 4 digits
  const auto facts = random_facts(random, 8, true, 0, text);
  ASSERT_EQ(facts.size(), 16u);
  std::set<std::string> texts;
  for (const Fact& fact : facts) {
    texts.insert(fact.prompt + fact.answer);
    EXPECT_EQ(text.find(fact.answer), std::string::npos);
    for (const Fact& other : facts) {
      if (&other != &fact) {
        EXPECT_EQ(other.answer.find(fact.answer), std::string::npos);
      }
    }
  }
  EXPECT_EQ(texts.size(), 16u);
}

}  // namespace
}  // namespace sqz::eval
