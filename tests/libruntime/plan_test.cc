// From budgets to thresholds: the arithmetic of docs/runtime.md, redone here by hand.
#include "libruntime/select/plan.h"

#include <gtest/gtest.h>

#include <cmath>

namespace sqz {
namespace {

using C = Calibration;

// 10,000 tokens, of which 9,900 clustered; levels of 100 and 500 clusters.
struct Inputs {
  IndexMetadata metadata;
  std::vector<LayerView> layers;
  Calibration calibration;
};

float threshold_value(int scope, int path, int group, int64_t i) {
  if (i == 0) return 1.0f;
  if (i == C::kGrid - 1) return -3.0e38f;
  return -static_cast<float>(i) / 100.0f - 20.0f * static_cast<float>(scope) -
         40.0f * static_cast<float>(path) - 80.0f * static_cast<float>(group);
}

Inputs make_setup(int64_t tokens = 10000, int64_t exact = 100) {
  Inputs s;
  s.metadata.tokens = tokens;
  s.metadata.levels = 2;
  s.metadata.model.layers = 3;
  s.metadata.model.kv_heads = 2;
  s.layers.resize(3);
  for (int l = 0; l < 2; ++l) {  // the third layer is dense
    LayerView& view = s.layers[l];
    view.levels = 2;
    view.level[0].clusters = 100;
    view.level[1].clusters = 500;
    view.slots = tokens - exact;
    view.exact = exact;
  }
  s.calibration.coarse_keep = {0.5};
  for (int scope = 0; scope < C::kScopes; ++scope) {
    for (int path = 0; path < C::kPaths; ++path) {
      for (int group = 0; group < C::kGroups; ++group) {
        for (int64_t i = 0; i < C::kGrid; ++i) {
          s.calibration.thresholds.push_back(threshold_value(scope, path, group, i));
        }
      }
    }
  }
  for (int i = 0; i < C::kScopes * C::kGroups; ++i) {
    s.calibration.coarse.push_back(-static_cast<float>(i) - 0.5f);
  }
  for (int i = 0; i < C::kScopes * 3 * 2; ++i) {
    for (int64_t g = 0; g < C::kGrid; ++g) {
      s.calibration.shares.push_back(
          std::min(1.0f, static_cast<float>(g * (i + 1)) / (C::kGrid - 1)));
    }
  }
  return s;
}

SelectionPlan plan(const Inputs& s, const SelectionRequest& request) {
  auto plan = plan_selection(s.metadata, s.layers, s.calibration, request, "x.sqz");
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? *plan : SelectionPlan();
}

Status refusal(const Inputs& s, const SelectionRequest& request) {
  return plan_selection(s.metadata, s.layers, s.calibration, request, "x.sqz").status();
}

TEST(Plan, BudgetOnTheTree) {
  // In keys: exact 100, level 1 100 / 2, level 2 half of 500 / 2, then 9,900 keep.
  const SelectionPlan p = plan(make_setup(), {.budget = 0.125});
  EXPECT_EQ(p.levels, 2);
  EXPECT_FALSE(p.dense);
  EXPECT_NEAR(p.asked_keep, (1250 - 100 - 50 - 125) / 9900.0, 1e-12);
  EXPECT_EQ(p.asked_budget, 0.125);
  EXPECT_NEAR(p.least_budget, (100 + 50 + 125) / 10000.0, 1e-12);
  const double at = p.asked_keep * 1024;
  EXPECT_NEAR(p.log_thresholds[0][1], -at / 100 - 40, 1e-4);
  EXPECT_NEAR(p.log_thresholds[1][1], -at / 100 - 60, 1e-4);
  EXPECT_EQ(p.log_thresholds[0][0], -0.5f);
  EXPECT_EQ(p.log_thresholds[1][0], -3.5f);
}

TEST(Plan, BudgetFlat) {
  const SelectionPlan flat = plan(make_setup(), {.levels = 1, .budget = 0.125});
  EXPECT_NEAR(flat.asked_keep, (1250 - 100 - 250) / 9900.0, 1e-12);
  EXPECT_NEAR(flat.log_thresholds[0][0], -flat.asked_keep * 10.24, 1e-4);
}

TEST(Plan, BudgetWithKeyCodes) {
  Inputs coded = make_setup();
  coded.metadata.key_codes = 2;
  for (LayerView& view : coded.layers) {
    view.head_dim = 64;
    view.key_codes.bits = 2;
  }
  const double code = 18 / 256.0;  // 64 times 2 bits and a scale, beside a key and its value
  for (const auto& [levels, fixed] : {std::pair(1, 100 + 250 + 250.0), {2, 100 + 50 + 125 + 25.0}}) {
    const SelectionPlan p = plan(coded, {.levels = levels, .budget = 0.125});
    EXPECT_TRUE(p.approximate);
    EXPECT_GT(p.alive, p.asked_keep);
    // Means stand for what is not read: at level 1 half of 100, at level 2 half of 500.
    const double means = levels == 2 ? 125 : 0;
    EXPECT_NEAR(fixed + means + 9900 * (p.alive * code + p.asked_keep), 1250, 0.1);
  }
}

TEST(Plan, AboveWhatTheTreeLetsThroughTheFlatPathServes) {
  const SelectionPlan below = plan(make_setup(), {.keep = 0.5});
  EXPECT_EQ(below.levels, 2);
  const SelectionPlan above = plan(make_setup(), {.keep = 0.51});
  EXPECT_EQ(above.levels, 1);
  EXPECT_EQ(above.log_thresholds[0].size(), 1u);
  EXPECT_NEAR(above.log_thresholds[0][0], -0.51 * 10.24, 1e-4);
  EXPECT_NEAR(above.asked_budget, (100 + 250 + 0.51 * 9900) / 10000, 1e-9);
}

TEST(Plan, GroupPicksItsOwnThresholds) {
  const SelectionPlan p = plan(make_setup(), {.group = GroupPolicy::kAny, .keep = 0.25});
  EXPECT_NEAR(p.log_thresholds[0][1], -2.56 - 40 - 160, 1e-4);
  EXPECT_EQ(p.log_thresholds[0][0], -2.5f);
  EXPECT_EQ(p.log_thresholds[1][0], -5.5f);
}

TEST(Plan, SharesOfTheBudgetRule) {
  const SelectionPlan p = plan(make_setup(), {.rule = RuleKind::kBudget, .keep = 0.1});
  ASSERT_EQ(p.head_keep.size(), 2u);
  for (int scope = 0; scope < 2; ++scope) {
    for (int i = 0; i < 6; ++i) {
      EXPECT_NEAR(p.head_keep[scope][i], std::min(1.0, 0.1 * (scope * 6 + i + 1)), 3e-3);
    }
  }
}

TEST(Plan, ThresholdsAtTheEndsOfTheGrid) {
  std::vector<float> grid(C::kGrid);
  for (int64_t i = 0; i < C::kGrid; ++i) grid[i] = threshold_value(0, 0, 0, i);
  EXPECT_EQ(calibrated_threshold(grid.data(), 0.0), 1.0f);
  EXPECT_EQ(calibrated_threshold(grid.data(), 0.3 / 1024), grid[1]);
  EXPECT_NEAR(calibrated_threshold(grid.data(), 2.25 / 1024), -0.0225, 1e-6);
  EXPECT_EQ(calibrated_threshold(grid.data(), 1023.5 / 1024), grid[1023]);
  EXPECT_EQ(calibrated_threshold(grid.data(), 1.0), grid[1024]);
  grid[1024] = -INFINITY;
  EXPECT_EQ(calibrated_threshold(grid.data(), 1023.5 / 1024), grid[1023]);
  EXPECT_EQ(calibrated_threshold(grid.data(), 1.0), -INFINITY);
}

TEST(Plan, ReadsEverythingWhenThatCostsNoMore) {
  const Inputs s = make_setup();
  EXPECT_TRUE(plan(s, {.budget = 1.0}).fallback);
  for (const double keep : {0.99, 1.0}) {  // with the centroids more than everything
    const SelectionPlan p = plan(s, {.keep = keep});
    EXPECT_TRUE(p.fallback);
    EXPECT_EQ(p.asked_budget, 1);
    EXPECT_EQ(p.asked_keep, keep);
  }
  EXPECT_FALSE(plan(s, {.keep = 0.9}).fallback);
}

TEST(Plan, BudgetThatCannotBeMet) {
  const Status status = refusal(make_setup(), {.budget = 0.02});
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("more than 0.0275"), std::string::npos) << status.message();
  // A short context runs dense instead.
  const SelectionPlan p = plan(make_setup(1000, 116), {.budget = 0.125});
  EXPECT_TRUE(p.dense && p.fallback);
  EXPECT_EQ(p.asked_budget, 0.125);
  EXPECT_EQ(plan(make_setup(1000, 116), {.budget = 0.1}).asked_keep, 0);
}

TEST(Plan, RefusesRequestsThatMakeNoSense) {
  const Inputs s = make_setup();
  const double thresholds[] = {0.1, 0.1}, negative[] = {0.1, -0.1}, nan[] = {NAN, 0.1};
  const SelectionRequest bad[] = {{},
                                  {.budget = 0.1, .keep = 0.1},
                                  {.budget = 0.1, .thresholds = thresholds},
                                  {.budget = -0.1},
                                  {.budget = 1.01},
                                  {.budget = NAN},
                                  {.keep = -0.5},
                                  {.keep = 1.5},
                                  {.levels = 3, .keep = 0.1},
                                  {.levels = -1, .keep = 0.1},
                                  {.thresholds = negative},
                                  {.thresholds = nan},
                                  {.rule = RuleKind::kBudget, .thresholds = thresholds}};
  for (const SelectionRequest& request : bad) {
    EXPECT_EQ(refusal(s, request).code(), Code::kInvalidArgument) << &request - bad;
  }
}

}  // namespace
}  // namespace sqz
