// What tools print with --json, read back for a report.
#include "tools/report/results.h"

#include <gmock/gmock.h>

#include "tests/common/json.h"
#include "tests/common/temporary_directory.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Json eval_row_json() {
  return {{"task", "loss"},
          {"tokens", 4000},
          {"selector", "squeezed"},
          {"levels", 2},
          {"rule", "budget"},
          {"group", "mean"},
          {"layers", "uniform"},
          {"block", 0},
          {"trials", 8},
          {"value", 3.25},
          {"stderr", 0.5},
          {"difference", {{"value", 0.125}, {"stderr", 0.0625}}},
          {"budget", {{"asked", 0.1}, {"delivered", 0.11}}},
          {"keep", {{"asked", 0.08}, {"delivered", 0.09}}},
          {"dense_fallback", false}};
}

Json profile_json() {
  return {{"event", "result"},
          {"producer", "sqz"},
          {"tokenizer_hash", ""},
          {"texts", 1},
          {"windows", 1},
          {"window", 100},
          {"tokens", 100},
          {"allocation", "groups"},
          {"context", 100},
          {"uniform_budget", 10},
          {"p", 0.5},
          {"cosine", {0.5, 0.75, 1.0}},
          {"cosine_error", {0.1, 0.0, 0.2}},
          {"group", {0, 1, 2}},
          {"budget", {13, 12, 5}},
          {"measured",
           {{"selector", "stream"},
            {"rule", "threshold"},
            {"budget", 0.1},
            {"dense_loss", 3},
            {"sweep",
             {{{"allocation", "uniform"},
               {"p", 1},
               {"strength", 1},
               {"loss", 3.5},
               {"gain", 0},
               {"gain_stderr", 0},
               {"delivered", 0.1}},
              {{"allocation", "groups"},
               {"p", 0.5},
               {"strength", 1},
               {"loss", 3.25},
               {"gain", 0.25},
               {"gain_stderr", 0.125},
               {"delivered", 0.11}}}}}}};
}

Json training_json() {
  return {{"event", "result"},
          {"scores",
           {{{"method", "kmeans"},
             {"queries", "far"},
             {"keys", "seen"},
             {"recall", {{"0.2", 0.5}, {"0.05", 0.25}}}}}}};
}

class Results : public ::testing::Test {
 protected:
  Result<ToolResults> read(const std::vector<Json>& events) {
    std::string text;
    for (const Json& event : events) text += event.dump() + "\n";
    return read_text(text);
  }
  Result<ToolResults> read_text(const std::string& text) {
    testing::write_file(directory_.file("r.jsonl"), text);
    EXPECT_EQ(is_json_file(directory_.file("r.jsonl")), text.starts_with('{'));
    return read_results(directory_.file("r.jsonl"));
  }
  void refused(const std::vector<Json>& events, const std::string& says) {
    const auto results = read(events);
    ASSERT_FALSE(results.ok()) << says;
    EXPECT_EQ(results.status().code(), Code::kCorrupt);
    EXPECT_THAT(results.status().message(), HasSubstr("r.jsonl"));
    EXPECT_THAT(results.status().message(), HasSubstr(says));
  }
  static Json row_event(const Json& row) {
    Json out = row;
    out["event"] = "row";
    return out;
  }
  static Json list_event(const char* kind, const std::vector<Json>& rows) {
    return {{"event", kind}, {"rows", rows}};
  }

  testing::TemporaryDirectory directory_;
};

TEST_F(Results, RowsOfEval) {
  Json skipped = eval_row_json();
  skipped["skipped"] = "too small";
  skipped["budget"] = {{"asked", 0.01}};
  for (const char* gone : {"value", "stderr", "difference", "keep", "trials"}) skipped.erase(gone);
  const auto results = read({list_event("result", {eval_row_json(), skipped})});
  ASSERT_TRUE(results.ok()) << results.status().message();
  ASSERT_EQ(results->rows.size(), 2u);
  const EvalRow& row = results->rows[0];
  EXPECT_EQ(row.task, "loss");
  EXPECT_EQ(row.on, "");
  EXPECT_EQ(row.tokens, 4000);
  EXPECT_EQ(row.setting, "squeezed, 2 levels, rule budget");
  EXPECT_FALSE(row.dense);
  EXPECT_EQ(row.trials, 8);
  EXPECT_EQ(row.value, 3.25);
  EXPECT_EQ(row.error, 0.5);
  EXPECT_EQ(row.difference, 0.125);
  EXPECT_EQ(row.difference_error, 0.0625);
  EXPECT_EQ(row.asked_budget, 0.1);
  EXPECT_EQ(row.budget, 0.11);
  EXPECT_EQ(row.asked_keep, 0.08);
  EXPECT_EQ(row.keep, 0.09);
  EXPECT_EQ(results->rows[1].skipped, "too small");
  EXPECT_EQ(results->rows[1].asked_budget, 0.01);
}

TEST_F(Results, SettingsAreTold) {
  const auto setting = [&](const Json& changes) {
    Json row = eval_row_json();
    row.merge_patch(changes);
    const auto results = read({row_event(row)});
    EXPECT_TRUE(results.ok()) << results.status().message();
    return results.ok() ? results->rows.at(0).setting : "";
  };
  EXPECT_EQ(setting({{"levels", 1}, {"group", "max"}}),
            "squeezed, 1 level, rule budget, group max");
  const Json bare = {{"levels", nullptr}, {"rule", nullptr}};  // a merge patch takes them away
  const auto with = [&](Json more) {
    more.update(bare);
    return setting(more);
  };
  EXPECT_EQ(with({{"selector", "quest"}, {"dense_layers", 0}}), "quest, dense layers 0");
  EXPECT_EQ(with({{"layers", "a/b.sqz"}}), "squeezed, layers b.sqz");
  EXPECT_EQ(with({{"layers", "a/b.sqz"},
                  {"allocation", {{"name", "groups"}, {"p", 0.7}, {"budget", 0.1}}}}),
            "squeezed, layers groups, p = 0.7");
  EXPECT_EQ(with({{"layers", "a/b.sqz"},
                  {"allocation", {{"name", "measured"}, {"p", 1}, {"budget", 0.2}}}}),
            "squeezed, layers measured, made for budget 0.2");
}

TEST_F(Results, OfAnInterruptedRunTheLastPassCounts) {
  Json other = eval_row_json();
  other["tokens"] = 8000;
  Json later = other;
  later["value"] = 2.5;
  const auto results = read({list_event("pass", {eval_row_json()}), row_event(eval_row_json()),
                             list_event("pass", {other}), list_event("pass", {later})});
  ASSERT_TRUE(results.ok()) << results.status().message();
  ASSERT_EQ(results->rows.size(), 2u) << "a finished length is not told twice";
  EXPECT_EQ(results->rows[0].tokens, 4000);
  EXPECT_EQ(results->rows[1].value, 2.5);
  const auto finished = read({list_event("pass", {eval_row_json()}), row_event(eval_row_json()),
                              list_event("result", {eval_row_json()})});
  EXPECT_EQ(finished->rows.size(), 1u);
  const auto between = read({list_event("pass", {eval_row_json()}), row_event(eval_row_json())});
  EXPECT_EQ(between->rows.size(), 1u);
}

TEST_F(Results, Profiles) {
  const auto results = read({profile_json()});
  ASSERT_TRUE(results.ok()) << results.status().message();
  EXPECT_THAT(results->rows, IsEmpty());
  ASSERT_TRUE(results->layers.has_value());
  EXPECT_THAT(results->layers->cosine, ElementsAre(0.5, 0.75, 1.0));
  EXPECT_THAT(results->layers->group, ElementsAre(0, 1, 2));
  EXPECT_THAT(results->layers->budget, ElementsAre(13, 12, 5));
  ASSERT_TRUE(results->measured.has_value());
  EXPECT_EQ(results->measured->selector, "stream");
  EXPECT_EQ(results->measured->dense_loss, 3);
  ASSERT_EQ(results->measured->candidates.size(), 2u);
  EXPECT_EQ(results->measured->candidates[0].name, "uniform");
  EXPECT_EQ(results->measured->candidates[1].name, "groups, p = 0.5");
  EXPECT_EQ(results->measured->candidates[1].gain, 0.25);
}

TEST_F(Results, Trainings) {
  const auto results =
      read({{{"event", "check"}, {"step", 50}, {"loss", 2.5}, {"recall", Json::object()}},
            training_json()});
  ASSERT_TRUE(results.ok()) << results.status().message();
  ASSERT_TRUE(results->training.has_value());
  ASSERT_EQ(results->training->checks.size(), 1u);
  EXPECT_EQ(results->training->checks[0].x, 50);
  EXPECT_EQ(results->training->checks[0].y, 2.5);
  ASSERT_EQ(results->training->scores.size(), 1u);
  const MethodRecall& method = results->training->scores[0];
  EXPECT_EQ(method.method, "kmeans");
  EXPECT_TRUE(method.far_queries);
  EXPECT_EQ(method.keys, "seen");
  ASSERT_EQ(method.recall.size(), 2u);
  EXPECT_EQ(method.recall[0].selectivity, 0.05) << "ascending";
  EXPECT_EQ(method.recall[0].recall, 0.25);
}

TEST_F(Results, WhatIsNoResultIsRefused) {
  refused({}, "no result in them");
  refused({{{"event", "result"}, {"path", "x"}}}, "1, and no result in them");
  refused({{{"event", 5}}}, "line 1: event: found 5");
  refused({row_event(eval_row_json()), {{"rows", 1}}}, "line 2: event: found nothing");
  refused({Json::array({1})}, "line 1: found an array of 1, expected an object");
  refused({{{"event", "result"}, {"rows", 1}}}, "rows: found 1, expected an array");
  const auto cut = read_text(row_event(eval_row_json()).dump().substr(0, 50));
  ASSERT_FALSE(cut.ok());
  EXPECT_THAT(cut.status().message(), HasSubstr("line 1"));
  const auto none = read_results(directory_.file("none"));
  EXPECT_EQ(none.status().code(), Code::kNotFound);
}

TEST_F(Results, WrongRowsAreRefused) {
  const auto wrong = [&](const Json& changes, const char* says) {
    Json row = eval_row_json();
    row.merge_patch(changes);
    refused({list_event("result", {eval_row_json(), row})}, concat("line 1: rows[1]: ", says));
  };
  wrong({{"task", 1}}, "task: found 1, expected a string");
  wrong({{"task", nullptr}}, "task: found nothing");
  wrong({{"tokens", 0}}, "tokens: found 0");
  wrong({{"tokens", 1.5}}, "tokens: found 1.5");
  wrong({{"selector", nullptr}}, "selector: found nothing");
  wrong({{"value", "x"}}, "value: found \"x\"");
  wrong({{"value", 1e31}}, "value: found 1e+31");
  wrong({{"stderr", -1}}, "stderr: found -1");
  wrong({{"budget", 3}}, "budget: found 3, expected numbers asked and delivered");
  wrong({{"keep", {{"asked", "x"}}}}, "keep: found an object");
  wrong({{"difference", {{"value", nullptr}}}}, "difference: found an object");
  wrong({{"levels", 17}}, "levels: found 17");
  wrong({{"layers", "x.sqz"}, {"allocation", {{"name", 1}}}}, "allocation: found");
}

TEST_F(Results, WrongProfilesAndTrainingsAreRefused) {
  const auto wrong = [&](Json result, const Json& changes, const char* says) {
    result.merge_patch(changes);
    refused({result}, says);
  };
  const Json profile = profile_json(), training = training_json();
  wrong(profile, {{"cosine", Json::array()}}, "cosine: found an array of 0");
  wrong(profile, {{"cosine", {0.5, 2.0, 0.5}}}, "cosine: found 2.0, expected numbers in [-1, 1]");
  wrong(profile, {{"group", {0, 1}}}, "group: found an array of 2, expected an array of 3");
  wrong(profile, {{"group", {0, 1, 3}}}, "group: found 3");
  wrong(profile, {{"budget", {1, "x", 2}}}, "budget: found \"x\"");
  wrong(profile, {{"measured", 1}}, "measured: found 1, expected an object");
  wrong(profile, {{"measured", {{"sweep", 1}}}}, "sweep: found 1, expected an array");
  wrong(profile, {{"measured", {{"sweep", {{{"loss", 1}}}}}}},
        "measured: sweep[0]: allocation: found nothing");
  wrong(training, {{"scores", 1}}, "scores: found 1, expected an array");
  wrong(training,
        {{"scores",
          {{{"method", "m"}, {"queries", "far"}, {"keys", "far"}, {"recall", {{"x", 1}}}}}}},
        "scores[0]: recall: found \"x\"");
  wrong(training,
        {{"scores",
          {{{"method", "m"}, {"queries", "far"}, {"keys", "far"}, {"recall", {{"1.5", 1}}}}}}},
        "scores[0]: recall: found \"1.5\"");
  refused({{{"event", "check"}, {"step", -1}, {"loss", 1}}}, "step: found -1");
}

}  // namespace
}  // namespace sqz
