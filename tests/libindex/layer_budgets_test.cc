// Groups and budgets of layers, against an exhaustive search and keys dealt one by one.
#include "libindex/layer_budgets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

namespace sqz {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
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

TEST(LayerBudgets, AlgorithmOneByHand) {
  // G3 has three layers of five; b_init 100, p 0.4: 40 each there, (500 - 120) / 2 = 190 elsewhere.
  const std::vector<int> groups = {0, 2, 2, 2, 1};
  const auto budgets = layer_budgets(groups, {.budget = 100, .context = 1000, .p = 0.4});
  ASSERT_TRUE(budgets.ok());
  EXPECT_THAT(*budgets, ElementsAre(190, 40, 40, 40, 190));
  // A context of 150 keys: 80 of the others' keys go back to the three.
  const auto short_context = layer_budgets(groups, {.budget = 100, .context = 150, .p = 0.4});
  ASSERT_TRUE(short_context.ok());
  EXPECT_THAT(*short_context, ElementsAre(150, 67, 67, 66, 150));
  const auto uniform = layer_budgets(groups, {.budget = 100, .context = 150, .p = 1});
  ASSERT_TRUE(uniform.ok());
  EXPECT_THAT(*uniform, ElementsAre(100, 100, 100, 100, 100));
}

TEST(LayerBudgets, RefusesCosinesThatMakeNoGroups) {
  EXPECT_THAT(group_layers(std::vector{0.4, 0.9}).status().message(),
              HasSubstr("layers: found 2, expected at least 3"));
  EXPECT_THAT(group_layers(std::vector{0.9, 0.9, 0.4, 0.4}).status().message(),
              AllOf(HasSubstr("found 2 different ones in 4 layers"), HasSubstr("uniform")));
  EXPECT_THAT(group_layers(std::vector<double>{0.9, NAN, 0.4}).status().message(),
              HasSubstr("cosine of layer 1: found nan, expected one in [-1, 1]"));
  EXPECT_THAT(group_layers(std::vector{0.9, 0.3, 1.4}).status().message(),
              HasSubstr("cosine of layer 2"));
}

TEST(LayerBudgets, RefusesBudgetsThatCannotBeMet) {
  const std::vector<int> groups = {0, 1, 2};
  const auto message = [&](BudgetRequest request) {
    return layer_budgets(groups, request).status().message();
  };
  EXPECT_THAT(message({.budget = 101, .context = 100}),
              HasSubstr("budget: found 101, expected 1 .. 100 keys"));
  EXPECT_THAT(message({.budget = 0, .context = 100}), HasSubstr("budget: found 0"));
  EXPECT_THAT(message({.budget = 10, .context = 100, .p = 0}), HasSubstr("p: found 0"));
  EXPECT_THAT(message({.budget = 10, .context = 100, .p = 1.01}), HasSubstr("p: found 1.01"));
  EXPECT_THAT(message({.budget = 10, .context = 100, .p = 0.01}),
              HasSubstr("leaves a layer of 10 keys at least one"));
  EXPECT_THAT(message({.budget = 1, .context = 0}), HasSubstr("context: found 0"));
  EXPECT_THAT(layer_budgets(std::vector{0, 1, 3}, {.budget = 1, .context = 2}).status().message(),
              HasSubstr("group: found 3, expected 0 .. 2 (layer 2)"));
  EXPECT_THAT(layer_budgets(std::vector{0, 1, 1}, {.budget = 1, .context = 2}).status().message(),
              HasSubstr("no layer in the last one"));
}

}  // namespace
}  // namespace sqz
