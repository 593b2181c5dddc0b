// Groups and budgets of layers, against exhaustive searches and keys dealt one by one.
#include "libindex/layer_budgets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <random>

namespace sqz {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

double spread(const std::vector<double>& cosines, const std::vector<int>& groups) {
  double sum = 0;
  for (int group = 0; group < 3; ++group) {
    double total = 0, count = 0;
    for (size_t i = 0; i < cosines.size(); ++i) {
      if (groups[i] == group) total += cosines[i], count += 1;
    }
    if (count == 0) return INFINITY;
    for (size_t i = 0; i < cosines.size(); ++i) {
      if (groups[i] == group) sum += std::pow(cosines[i] - total / count, 2);
    }
  }
  return sum;
}

// Every assignment of layers to three groups, contiguous in the cosine or not.
std::vector<int> exhaustive_groups(const std::vector<double>& cosines) {
  const size_t n = cosines.size();
  std::vector<int> best, groups(n);
  double least = INFINITY;
  for (int64_t code = 0; code < std::llround(std::pow(3, n)); ++code) {
    int64_t rest = code;
    for (int& group : groups) group = static_cast<int>(rest % 3), rest /= 3;
    // One name a split: groups ascend with their means.
    double mean[3] = {0, 0, 0}, count[3] = {0, 0, 0};
    for (size_t i = 0; i < n; ++i) mean[groups[i]] += cosines[i], count[groups[i]] += 1;
    for (int g = 0; g < 3; ++g) mean[g] /= count[g];
    if (!(mean[0] < mean[1] && mean[1] < mean[2])) continue;
    const double sum = spread(cosines, groups);
    if (sum < least - 1e-12) least = sum, best = groups;
  }
  return best;
}

// Algorithm 1 with whole keys, one key at a time to the poorest layer that has room.
std::vector<int64_t> dealt_budgets(const std::vector<int>& groups, const BudgetRequest& request) {
  std::vector<int64_t> budgets(groups.size(), 0);
  int64_t left = request.budget * std::ssize(groups);
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i] != 2) continue;
    budgets[i] = std::llround(request.p * static_cast<double>(request.budget));
    left -= budgets[i];
  }
  for (const bool last : {false, true}) {
    while (left > 0) {
      int64_t poorest = -1;
      for (int64_t i = 0; i < std::ssize(groups); ++i) {
        const bool open = (groups[i] == 2) == last && budgets[i] < request.context;
        if (open && (poorest < 0 || budgets[i] < budgets[poorest])) poorest = i;
      }
      if (poorest < 0) break;
      ++budgets[poorest];
      --left;
    }
  }
  return budgets;
}

TEST(LayerBudgets, EqualAnExhaustiveSearchForRandomCosinesAndTotals) {
  std::mt19937_64 random(8);
  int64_t clamped = 0;
  for (int round = 0; round < 1000; ++round) {
    const size_t layers = 3 + random() % 6;
    std::vector<double> cosines(layers);
    for (double& c : cosines) c = std::uniform_real_distribution(-0.2, 1.0)(random);
    const auto groups = group_layers(cosines);
    ASSERT_TRUE(groups.ok()) << groups.status().message();
    ASSERT_EQ(*groups, exhaustive_groups(cosines)) << "round " << round;

    BudgetRequest request;
    request.context = 1 + static_cast<int64_t>(random() % 600);
    request.budget = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(request.context));
    request.p = std::uniform_real_distribution(0.05, 1.0)(random);
    if (std::llround(request.p * static_cast<double>(request.budget)) < 1) continue;
    const auto budgets = layer_budgets(*groups, request);
    ASSERT_TRUE(budgets.ok()) << budgets.status().message();
    ASSERT_EQ(*budgets, dealt_budgets(*groups, request)) << "round " << round;
    ASSERT_EQ(std::accumulate(budgets->begin(), budgets->end(), int64_t{0}),
              request.budget * static_cast<int64_t>(layers));
    for (const int64_t budget : *budgets) {
      ASSERT_LE(budget, request.context);
      clamped += budget == request.context && request.budget < request.context;
    }
  }
  EXPECT_GT(clamped, 100);
}

TEST(LayerBudgets, RefusesCosinesThatMakeNoGroups) {
  EXPECT_FALSE(group_layers(std::vector{0.4, 0.9}).ok());
  EXPECT_THAT(group_layers(std::vector{0.9, 0.9, 0.4, 0.4}).status().message(),
              AllOf(HasSubstr("found 2 different ones in 4 layers"), HasSubstr("uniform")));
}

TEST(LayerBudgets, RefusesBudgetsThatCannotBeMet) {
  const std::vector<int> groups = {0, 1, 2};
  const auto message = [&](BudgetRequest request) {
    return layer_budgets(groups, request).status().message();
  };
  EXPECT_THAT(message({.budget = 101, .context = 100}),
              HasSubstr("budget: found 101, expected 1 .. 100 keys"));
  EXPECT_THAT(message({.budget = 0, .context = 100}), HasSubstr("budget: found 0"));
  EXPECT_THAT(message({.budget = 10, .context = 100, .p = 0.01}),
              HasSubstr("leaves a layer of 10 keys at least one"));
}

// ---- Keys dealt by measured losses.

double loss_at(const LayerLoss& layer, int64_t tenths) {
  for (const auto& point : layer.points) {
    if (std::lround(point.keys * 10) == tenths) return point.loss;
  }
  return INFINITY;
}

// The least sum over all layers' keys in tenths.
double exhaustive(const std::vector<LayerLoss>& layers, size_t first, int64_t left) {
  if (first == layers.size()) return left == 0 ? 0 : INFINITY;
  double best = INFINITY;
  for (int64_t keys = 1; keys <= std::min<int64_t>(left, 10); ++keys) {
    best =
        std::min(best, loss_at(layers[first], keys) + exhaustive(layers, first + 1, left - keys));
  }
  return best;
}

double interpolated(const LayerLoss& layer, double keys) {
  const auto low = static_cast<int64_t>(std::floor(keys * 10 + 1e-9));
  const double part = keys * 10 - static_cast<double>(low);
  if (part < 1e-9) return loss_at(layer, low);
  return loss_at(layer, low) * (1 - part) + loss_at(layer, low + 1) * part;
}

TEST(MeasuredBudgets, NoOtherWayIsBetter) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 1000; ++round) {
    std::vector<LayerLoss> layers(2 + random() % 3);
    for (LayerLoss& layer : layers) {  // convex and falling: gains that shrink
      std::vector<double> gains;
      for (int i = 0; i < 9; ++i) gains.push_back(static_cast<double>(random() % 1000));
      std::sort(gains.begin(), gains.end());
      double loss = 0;
      for (int i = 10; i >= 1; --i) {
        layer.points.push_back({i / 10.0, loss});
        if (i > 1) loss += gains[static_cast<size_t>(10 - i)];
      }
    }
    const auto n = static_cast<int64_t>(layers.size());
    const int64_t total = n + static_cast<int64_t>(random() % static_cast<uint64_t>(9 * n + 1));
    const auto keys = least_loss_keys(layers, static_cast<double>(total) / 10);
    double sum = 0, loss = 0;
    for (size_t l = 0; l < layers.size(); ++l) {
      ASSERT_GE(keys[l], 0.1 - 1e-9);
      ASSERT_LE(keys[l], 1 + 1e-9);
      sum += keys[l];
      loss += interpolated(layers[l], keys[l]);
    }
    ASSERT_NEAR(sum, static_cast<double>(total) / 10, 1e-9);
    ASSERT_NEAR(loss, exhaustive(layers, 0, total), 1e-6);
  }
}

TEST(MeasuredBudgets, KeysThatWouldCostAreDealtAlike) {
  const std::vector<LayerLoss> layers = {{{{0.1, 1}, {0.5, 2}}}, {{{0.1, 1}, {0.5, 0.5}}}};
  const auto keys = least_loss_keys(layers, 1);
  EXPECT_NEAR(keys[0], 0.3, 1e-9);
  EXPECT_NEAR(keys[1], 0.7, 1e-9);
}

TEST(MeasuredBudgets, PointsAboveTheHullAreNotPaidFor) {
  // The second layer's noise at 0.2 and 0.3 would stop a greedy choice that looks one point ahead.
  const std::vector<LayerLoss> layers = {{{{0.1, 10}, {0.2, 9}, {0.4, 7}}},
                                         {{{0.1, 20}, {0.2, 21}, {0.3, 20.5}, {0.4, 2}}}};
  const auto keys = least_loss_keys(layers, 0.5);
  EXPECT_NEAR(keys[0], 0.1, 1e-12);
  EXPECT_NEAR(keys[1], 0.4, 1e-12);
  // Beyond the last points all get the same, up to all of their keys.
  const auto many = least_loss_keys(layers, 1.2);
  EXPECT_NEAR(many[0], 0.6, 1e-12);
  EXPECT_NEAR(many[1], 0.6, 1e-12);
  EXPECT_NEAR(least_loss_keys(layers, 2)[0], 1, 1e-12);
}

TEST(ScaledBudgets, SumIsExactAndEveryLayerHasAKey) {
  std::mt19937_64 random(6);
  for (int round = 0; round < 1000; ++round) {
    const auto n = 1 + random() % 20;
    std::vector<double> scales;
    for (uint64_t l = 0; l < n; ++l) scales.push_back(1e-3 + static_cast<double>(random() % 5000));
    const auto context = static_cast<int64_t>(1 + random() % 2000);
    const auto budget = static_cast<int64_t>(1 + random() % static_cast<uint64_t>(context));
    const auto budgets = scaled_budgets(scales, {.budget = budget, .context = context});
    ASSERT_EQ(std::accumulate(budgets.begin(), budgets.end(), int64_t{0}),
              budget * static_cast<int64_t>(n));
    for (const int64_t own : budgets) {
      ASSERT_GE(own, 1);
      ASSERT_LE(own, context);
    }
  }
  const std::vector<double> scales = {0.5, 1.5};
  EXPECT_THAT(scaled_budgets(scales, {.budget = 101, .context = 1000}),
              ::testing::ElementsAre(51, 151));
}

}  // namespace
}  // namespace sqz
