// Calibration against a float64 evaluation of equations 1 to 3, written out.
#include "libindex/calibrate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/libindex/calibration_data.h"

namespace sqz {
namespace {

constexpr int64_t kHeads = test::kCalibrationHeads, kGroup = test::kCalibrationGroup,
                  kDim = test::kCalibrationDim, kQueries = test::kCalibrationQueries,
                  kLayers = test::kCalibrationLayers;
constexpr int64_t kLast = Calibration::kGrid - 1;
using test::make_input;

// One KV head, in plain double.
struct PlainHead {
  const CalibrationInput& input;
  const CalibrationLayer& layer;
  int64_t head;

  int64_t clusters(size_t k) const {
    return static_cast<int64_t>(layer.levels[k].children.size()) / kHeads - 1;
  }
  int64_t child(size_t k, int64_t i) const {
    return layer.levels[k].children[head * (clusters(k) + 1) + i];
  }
  int64_t keys_below(size_t k, int64_t i) const {
    int64_t first = child(k, i), last = child(k, i + 1);
    for (size_t below = k + 1; below < layer.levels.size(); ++below) {
      first = child(below, first);
      last = child(below, last);
    }
    return last - first;
  }
  double logit(size_t k, int64_t i, int64_t token, int64_t member) const {
    double sum = 0;
    for (int64_t c = 0; c < kDim; ++c) {
      BFloat16 x;
      std::memcpy(&x.bits, &layer.levels[k].centroids[((head * clusters(k) + i) * kDim + c) * 2],
                  2);
      sum += double{to_float(x)} *
             layer.queries[((head * kQueries + token) * kGroup + member) * kDim + c];
    }
    return sum * input.scale;
  }

  // log of the combined S of tokens first .. first + count - 1; -infinity where not alive.
  std::vector<double> scores(size_t k, const std::vector<bool>& alive, int64_t first,
                             int64_t count) const {
    const auto n = static_cast<size_t>(clusters(k));
    std::vector<double> mean(n, 0.0);
    for (int64_t member = 0; member < kGroup; ++member) {
      for (int64_t token = first; token < first + count; ++token) {
        std::vector<double> s(n, 0.0);
        double denominator = 0;
        for (size_t i = 0; i < n; ++i) {
          const auto cluster = static_cast<int64_t>(i);
          if (!alive[i]) continue;
          s[i] = std::exp(logit(k, cluster, token, member));
          denominator += s[i] * static_cast<double>(keys_below(k, cluster));
        }
        for (size_t i = 0; i < n; ++i) {
          mean[i] += s[i] / denominator / static_cast<double>(count * kGroup);
        }
      }
    }
    for (double& s : mean) s = s > 0 ? std::log(s) : -std::numeric_limits<double>::infinity();
    return mean;
  }

  // The fraction of keys of the clusters of level `last` that survive all thresholds down to it.
  double kept(size_t first_level, size_t last, const std::vector<double>& thresholds, int64_t token,
              int64_t count) const {
    std::vector<bool> alive(static_cast<size_t>(clusters(first_level)), true);
    int64_t keys = 0;
    for (size_t k = first_level; k <= last; ++k) {
      const std::vector<double> s = scores(k, alive, token, count);
      std::vector<bool> next(k < last ? static_cast<size_t>(clusters(k + 1)) : 0, false);
      for (int64_t i = 0; i < clusters(k); ++i) {
        if (!alive[i] || s[i] < thresholds[k - first_level]) continue;
        if (k == last) keys += keys_below(k, i);
        for (int64_t c = child(k, i); k < last && c < child(k, i + 1); ++c) next[c] = true;
      }
      alive = next;
    }
    int64_t all = 0;
    for (int64_t i = 0; i < clusters(last); ++i) all += keys_below(last, i);
    return static_cast<double>(keys) / static_cast<double>(all);
  }

  // Mean over the selections of a scope.
  double mean_kept(int scope, size_t first_level, size_t last,
                   const std::vector<double>& thresholds) const {
    std::vector<std::pair<int64_t, int64_t>> selections;  // first token, count
    int64_t first = 0;
    for (const int64_t count : input.calls) {
      if ((count > 1) == (scope == 1)) selections.emplace_back(first, count);
      first += count;
    }
    if (input.calls.empty() && scope == 1) selections.emplace_back(0, kQueries);
    if (input.calls.empty() && scope == 0) {
      for (int64_t t = 0; t < kQueries; ++t) selections.emplace_back(t, 1);
    }
    double sum = 0;
    for (const auto& [token, count] : selections) {
      sum += kept(first_level, last, thresholds, token, count);
    }
    return sum / static_cast<double>(selections.size());
  }
};

double mean_over_heads(const CalibrationInput& input, int scope, size_t first_level, size_t last,
                       const std::vector<double>& thresholds) {
  double sum = 0;
  for (const CalibrationLayer& layer : input.sparse) {
    for (int64_t h = 0; h < kHeads; ++h) {
      sum += PlainHead{input, layer, h}.mean_kept(scope, first_level, last, thresholds);
    }
  }
  return sum / static_cast<double>(input.sparse.size() * kHeads);
}

Calibration calibrated(const CalibrationInput& input, int threads = 2) {
  auto result = calibrate(input, threads);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? std::move(result).value() : Calibration();
}

const float* curve(const Calibration& c, int scope, int path) {
  return c.thresholds.data() + (scope * Calibration::kPaths + path) * Calibration::kGrid;
}

// Of a scope.
class Calibrated : public testing::TestWithParam<int> {
 protected:
  const int scope_ = GetParam();
  // A threshold can only fall between clusters. Scope 1 has 6 selections, scope 0 has 150.
  const double tolerance_ = scope_ == 0 ? 0.004 : 0.012;
};

TEST_P(Calibrated, FlatThresholdsKeepTheirFraction) {
  const CalibrationInput input = make_input({12, 150}, 1500);
  const Calibration c = calibrated(input);
  for (int64_t i : {10, 64, 128, 300, 512, 900, 1015}) {
    const double threshold = curve(c, scope_, 0)[i];
    EXPECT_NEAR(mean_over_heads(input, scope_, 1, 1, {threshold}), static_cast<double>(i) / kLast,
                tolerance_);
  }
}

TEST_P(Calibrated, TwoLevelThresholdsKeepTheirFraction) {
  const CalibrationInput input = make_input({60, 300}, 1500);
  const Calibration c = calibrated(input);
  const double first = c.coarse[scope_];
  EXPECT_EQ(c.coarse_keep, std::vector<double>{0.5});
  // Level 1 has few clusters, so that one is a larger part of the keys.
  EXPECT_NEAR(mean_over_heads(input, scope_, 0, 0, {first}), 0.5, 2 * tolerance_);
  for (int64_t i : {10, 64, 128, 300}) {
    EXPECT_NEAR(mean_over_heads(input, scope_, 0, 1, {first, curve(c, scope_, 1)[i]}),
                static_cast<double>(i) / kLast, tolerance_);
  }
}

TEST_P(Calibrated, ThreeLevelThresholdsKeepTheirFraction) {
  CalibrationInput input = make_input({60, 150, 400}, 1500);
  input.coarse_keep = 0.7;
  const Calibration c = calibrated(input);
  const double first = c.coarse[scope_ * 2];
  const double second = c.coarse[scope_ * 2 + 1];
  ASSERT_EQ(c.coarse_keep.size(), 2u);
  EXPECT_DOUBLE_EQ(c.coarse_keep[1], 0.49);
  EXPECT_NEAR(mean_over_heads(input, scope_, 0, 0, {first}), 0.7, 2 * tolerance_);
  EXPECT_NEAR(mean_over_heads(input, scope_, 0, 1, {first, second}), 0.49, 2 * tolerance_);
  for (int64_t i : {64, 128, 300}) {
    EXPECT_NEAR(mean_over_heads(input, scope_, 0, 2, {first, second, curve(c, scope_, 1)[i]}),
                static_cast<double>(i) / kLast, tolerance_);
  }
}

// Of recorded calls, those with one query are one scope and those with several the other.
TEST_P(Calibrated, CallsCountInTheScopeThatServesThem) {
  CalibrationInput input = make_input({60, 300}, 1500);
  input.calls = {7, 1, 1, 1, 3, 1, 5, 1, 1, 4};
  const Calibration c = calibrated(input);
  const double first = c.coarse[scope_];
  EXPECT_NEAR(mean_over_heads(input, scope_, 0, 0, {first}), 0.5, 0.02);
  for (int64_t i : {64, 128, 300}) {
    const double asked = static_cast<double>(i) / kLast;
    EXPECT_NEAR(mean_over_heads(input, scope_, 1, 1, {curve(c, scope_, 0)[i]}), asked, 0.01);
    EXPECT_NEAR(mean_over_heads(input, scope_, 0, 1, {first, curve(c, scope_, 1)[i]}), asked, 0.01);
  }
}

INSTANTIATE_TEST_SUITE_P(Scopes, Calibrated, testing::Values(0, 1));

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
          EXPECT_NEAR(share, (PlainHead{input, layer, h}.mean_kept(scope, 1, 1, {threshold})),
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

TEST(Calibrate, CurvesFallAndEndBeyondEveryScore) {
  const Calibration c = calibrated(make_input({12, 150}, 1500));
  for (int scope : {0, 1}) {
    for (int path : {0, 1}) {
      const float* t = curve(c, scope, path);
      EXPECT_GT(t[0], 0.0f);
      EXPECT_LT(t[kLast], -1e30f);
      EXPECT_TRUE(std::isfinite(t[kLast]));
      for (int64_t i = 1; i <= kLast; ++i) EXPECT_LE(t[i], t[i - 1]);
    }
  }
}

TEST(Calibrate, WhatTheTreeCannotKeepGetsTheLowestThreshold) {
  const CalibrationInput input = make_input({60, 300}, 1500);
  const Calibration c = calibrated(input);
  EXPECT_GT(curve(c, 0, 1)[kLast * 45 / 100], -1000.0f);
  EXPECT_LT(curve(c, 0, 1)[kLast * 55 / 100], -1e30f);
  EXPECT_GT(curve(c, 0, 0)[kLast * 55 / 100], -1000.0f);
}

TEST(Calibrate, OneLevelHasOnePath) {
  const Calibration c = calibrated(make_input({150}, 1500));
  EXPECT_TRUE(c.coarse_keep.empty());
  EXPECT_EQ(c.coarse.size(), 2u);
  for (int64_t i = 0; i <= kLast; ++i) EXPECT_EQ(curve(c, 0, 0)[i], curve(c, 0, 1)[i]);
}

TEST(Calibrate, KeepingEverythingInTheCoarseLevelsIsTheFlatLookup) {
  CalibrationInput input = make_input({12, 150}, 1500);
  input.coarse_keep = 1.0;
  const Calibration c = calibrated(input);
  for (int64_t i = 0; i <= kLast; ++i) EXPECT_EQ(curve(c, 1, 0)[i], curve(c, 1, 1)[i]);
}

TEST(Calibrate, SameBitsForAnyThreads) {
  const CalibrationInput input = make_input({12, 150}, 1500);
  const Calibration one = calibrated(input, 1), many = calibrated(input, 5);
  EXPECT_EQ(one.thresholds, many.thresholds);
  EXPECT_EQ(one.coarse, many.coarse);
  EXPECT_EQ(one.shares, many.shares);
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

TEST(Calibrate, NothingToDoWithoutSparseLayers) {
  CalibrationInput input = make_input({150}, 1500);
  input.sparse.clear();
  EXPECT_TRUE(calibrated(input).thresholds.empty());
}

TEST(Calibrate, QueriesAreGroupedByKvHead) {
  // [Hq = 4, n = 2, d = 1] to [Hkv = 2, n = 2, group = 2, d = 1]
  const std::vector<float> queries = {0, 1, 10, 11, 20, 21, 30, 31};
  EXPECT_EQ(group_queries(queries.data(), 2, 2, 2, 1),
            (std::vector<float>{0, 10, 1, 11, 20, 30, 21, 31}));
}

}  // namespace
}  // namespace sqz
