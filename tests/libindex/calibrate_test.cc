// Calibration against a float64 evaluation of equations 1 to 3, written out.
#include "libindex/calibrate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "libindex/quantile.h"
#include "tests/common/must.h"
#include "tests/libindex/calibration_data.h"
#include "tests/libruntime/reference.h"

namespace sqz::calibrate_test {

constexpr int64_t kHeads = test::kCalibrationHeads, kGroup = test::kCalibrationGroup,
                  kDim = test::kCalibrationDim, kQueries = test::kCalibrationQueries,
                  kLayers = test::kCalibrationLayers;
constexpr int64_t kLast = Calibration::kGrid - 1;
using test::make_input;

LayerView view_of(const CalibrationLayer& layer) {
  LayerView view;
  view.head_dim = kDim;
  view.kv_heads = kHeads;
  view.levels = static_cast<int>(layer.levels.size());
  for (int k = 0; k < view.levels; ++k) {
    const CalibrationLayer::Level& level = layer.levels[k];
    view.level[k] = {std::ssize(level.children) / kHeads - 1, level.centroids.data(),
                     level.children.data(), nullptr};
  }
  view.slots = layer.levels.back().children.back();
  return view;
}

// The fraction of a head's keys that survive the thresholds of levels first to last, for one
// selection.
double kept(const CalibrationInput& input, const CalibrationLayer& layer, int64_t head, int first,
            int last, const std::vector<double>& thresholds, int64_t token, int64_t count) {
  LayerView view = view_of(layer);
  std::vector<uint32_t> slots;
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t i = 0; i <= view.level[last].clusters; ++i) {
      slots.push_back(static_cast<uint32_t>(reference::first_slot(view, h, last, i)));
    }
  }
  view.level[last].offsets = slots.data();
  view.levels = last + 1;
  const float* q = layer.queries.data() + (head * kQueries + token) * kGroup * kDim;
  const auto chosen =
      reference::select(view, head, {q, q + count * kGroup * kDim}, count, kGroup, input.scale,
                        {.levels = last - first + 1, .log_thresholds = thresholds});
  return static_cast<double>(std::count(chosen.slots.begin(), chosen.slots.end(), true)) /
         static_cast<double>(view.slots);
}

// Mean over the selections of a scope.
double mean_kept(const CalibrationInput& input, const CalibrationLayer& layer, int64_t head,
                 int scope, int first, int last, const std::vector<double>& thresholds) {
  std::vector<std::pair<int64_t, int64_t>> selections;  // first token, count
  int64_t begin = 0;
  for (const int64_t count : input.calls) {
    if ((count > 1) == (scope == 1)) selections.emplace_back(begin, count);
    begin += count;
  }
  for (int64_t t = 0; t < kQueries && input.calls.empty() && scope == 0; ++t) {
    selections.emplace_back(t, 1);
  }
  if (selections.empty()) selections.emplace_back(0, kQueries);
  double sum = 0;
  for (const auto& [token, count] : selections) {
    sum += kept(input, layer, head, first, last, thresholds, token, count);
  }
  return sum / static_cast<double>(selections.size());
}

double mean_over_heads(const CalibrationInput& input, int scope, int first, int last,
                       const std::vector<double>& thresholds) {
  double sum = 0;
  for (const CalibrationLayer& layer : input.sparse) {
    for (int64_t h = 0; h < kHeads; ++h) {
      sum += mean_kept(input, layer, h, scope, first, last, thresholds);
    }
  }
  return sum / static_cast<double>(input.sparse.size() * kHeads);
}

Calibration calibrated(const CalibrationInput& input) {
  return must(calibrate(input, 2));
}

const float* curve(const Calibration& c, int scope, int path) {
  return c.thresholds.data() + (scope * Calibration::kPaths + path) * Calibration::kGrid;
}

struct Tree {
  std::vector<int64_t> clusters;
  double coarse_keep = 0.5;
  std::vector<int64_t> calls = {};
};

// Recorded calls with one query are one scope, and those with several the other.
TEST(Calibrate, ThresholdsKeepTheirFraction) {
  for (const auto& [clusters, coarse_keep, calls] :
       {Tree{{300}}, Tree{{60, 300}}, Tree{{60, 150, 400}, 0.7},
        Tree{{60, 300}, 0.5, {7, 1, 1, 1, 3, 1, 5, 1, 1, 4}}}) {
    CalibrationInput input = make_input(clusters, 1500);
    input.coarse_keep = coarse_keep;
    input.calls = calls;
    const Calibration c = calibrated(input);
    const auto finest = static_cast<int>(clusters.size()) - 1;
    ASSERT_EQ(std::ssize(c.coarse_keep), finest);
    for (const int scope : {0, 1}) {
      SCOPED_TRACE(::testing::Message() << finest + 1 << " levels, scope " << scope);
      // A threshold can only fall between clusters. Scope 1 has 6 selections, scope 0 has 150.
      const double tolerance = scope == 0 && calls.empty() ? 0.004 : 0.012;
      const auto asked = [](int64_t i) { return static_cast<double>(i) / kLast; };
      for (const int64_t i : {10, 64, 128, 300, 512, 900, 1015}) {
        EXPECT_NEAR(mean_over_heads(input, scope, finest, finest, {curve(c, scope, 0)[i]}),
                    asked(i), tolerance);
      }
      std::vector<double> thresholds;
      for (int k = 0; k < finest; ++k) {
        thresholds.push_back(c.coarse[scope * finest + k]);
        EXPECT_DOUBLE_EQ(c.coarse_keep[k], std::pow(coarse_keep, k + 1));
        // Coarse levels have few clusters, so that one is a larger part of the keys.
        EXPECT_NEAR(mean_over_heads(input, scope, 0, k, thresholds), c.coarse_keep[k],
                    2 * tolerance);
      }
      thresholds.push_back(0);
      for (const int64_t i : {64, 128, 300}) {
        thresholds.back() = curve(c, scope, 1)[i];
        EXPECT_NEAR(mean_over_heads(input, scope, 0, finest, thresholds), asked(i), tolerance);
      }
    }
  }
}

TEST(Calibrate, SharesAreWhatEachHeadKeeps) {
  CalibrationInput input = make_input({12, 150}, 1500);
  for (float& x : input.sparse[0].queries) x *= 0.2f;  // layer 0 is flat, the others are peaked
  const Calibration c = calibrated(input);
  for (int scope : {0, 1}) {
    for (int64_t i : {int64_t{0}, int64_t{128}, int64_t{512}, kLast}) {
      const double threshold = curve(c, scope, 0)[i];
      double sum = 0;
      for (const CalibrationLayer& layer : input.sparse) {
        for (int64_t h = 0; h < kHeads; ++h) {
          const float share =
              c.shares[((scope * kLayers + layer.layer) * kHeads + h) * Calibration::kGrid + i];
          EXPECT_NEAR(share, mean_kept(input, layer, h, scope, 1, 1, {threshold}),
                      scope == 0 ? 0.01 : 0.05);  // one selection in scope 1: a cluster is 1 to 4 %
          sum += share;
        }
      }
      EXPECT_NEAR(sum / 6, static_cast<double>(i) / kLast, 1e-3);
    }
    for (int64_t h = 0; h < kHeads; ++h) {  // the dense layer
      EXPECT_EQ(c.shares[((scope * kLayers + 1) * kHeads + h) * Calibration::kGrid], 1.0f);
    }
  }
  const float flat = c.shares[128], peaked = c.shares[2 * kHeads * Calibration::kGrid + 128];
  EXPECT_GT(std::abs(flat - peaked), 0.05) << "the heads were meant to differ";
}

TEST(Calibrate, WhatTheTreeCannotKeepGetsTheLowestThreshold) {
  const CalibrationInput input = make_input({60, 300}, 1500);
  const Calibration c = calibrated(input);
  EXPECT_GT(curve(c, 0, 1)[kLast * 45 / 100], -1000.0f);
  EXPECT_LT(curve(c, 0, 1)[kLast * 55 / 100], -1e30f);
  EXPECT_GT(curve(c, 0, 0)[kLast * 55 / 100], -1000.0f);
}

TEST(Calibrate, AScopeWithoutCallsTakesWhatThereIs) {
  CalibrationInput input = make_input({12, 150}, 1500);
  const Calibration tail = calibrated(input);
  input.calls = {kQueries};  // a prompt without an answer: its tokens one by one
  EXPECT_EQ(calibrated(input).thresholds, tail.thresholds);
  input.calls.assign(kQueries, 1);  // answers alone
  const Calibration answers = calibrated(input);
  for (int64_t i = 0; i <= kLast; ++i) {
    EXPECT_EQ(curve(answers, 0, 0)[i], curve(tail, 0, 0)[i]);
    EXPECT_EQ(curve(answers, 1, 0)[i], curve(tail, 0, 0)[i]);
  }
}

TEST(Calibrate, HugeLogitsAreAnErrorThatNamesTheHead) {
  CalibrationInput input = make_input({12, 150}, 1500);
  const int64_t per_head = kQueries * kGroup * kDim;
  input.sparse[1].queries[per_head + 5] = std::numeric_limits<float>::infinity();
  const Status status = calibrate(input, 2).status();
  EXPECT_EQ(status.code(), Code::kNumeric);
  EXPECT_NE(status.message().find("layer 2, KV head 1"), std::string::npos) << status.message();
}

TEST(ScoreSketch, EndsAreBeyondEveryScore) {
  ScoreSketch sketch, high;
  for (float score : {0.0f, -1e-9f, -5.0f, -500.0f, -1e6f}) sketch.add(score, 1);
  EXPECT_GT(sketch.threshold(0), 0.0f);
  EXPECT_EQ(sketch.threshold(1), kBelowAllScores);
  EXPECT_EQ(sketch.kept(std::vector{kAboveAllScores, -100.0f, kBelowAllScores}),
            (std::vector<float>{0, 0.6f, 1}));
  high.add(-5, 1);
  std::vector<float> curve(3);
  high.fill_curve(curve);
  EXPECT_EQ(curve[2], kBelowAllScores);
}

TEST(Calibrate, QueriesAreGroupedByKvHead) {
  // [Hq = 4, n = 2, d = 1] to [Hkv = 2, n = 2, group = 2, d = 1]
  const std::vector<float> queries = {0, 1, 10, 11, 20, 21, 30, 31};
  EXPECT_EQ(group_queries(queries.data(), 2, 2, 2, 1),
            (std::vector<float>{0, 10, 1, 11, 20, 30, 21, 31}));
}

}  // namespace sqz::calibrate_test
