// Rules against their definition, on scores with ties, dead clusters and empty ones.
#include "libruntime/select/rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/libruntime/random_data.h"

namespace sqz {
namespace {

struct Scored {
  std::vector<float> scores;
  std::vector<uint32_t> sizes;
};

// Few distinct scores, so that ties are common.
Scored random_scores(int64_t n, uint64_t seed) {
  testing::Random random(seed);
  Scored s;
  for (int64_t i = 0; i < n; ++i) {
    s.sizes.push_back(static_cast<uint32_t>(random.below(30)));
    const bool dead = s.sizes.back() == 0 || random.below(5) == 0;
    s.scores.push_back(dead ? -INFINITY : -static_cast<float>(random.below(12)));
  }
  return s;
}

std::vector<uint8_t> choose(const Rule& rule, const Scored& s, Choice choice) {
  choice.scores = s.scores;
  choice.sizes = s.sizes;
  std::vector<uint32_t> order(s.scores.size());
  std::vector<uint8_t> chosen(s.scores.size(), 7);
  rule.choose(choice, order, chosen);
  return chosen;
}

// By full sort: best first, lower index first among equals.
std::vector<uint8_t> filled(const Scored& s, int64_t wanted, bool nearest) {
  std::vector<size_t> ranked;
  for (size_t i = 0; i < s.scores.size(); ++i) {
    if (s.scores[i] > -INFINITY) ranked.push_back(i);
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [&](size_t a, size_t b) { return s.scores[a] > s.scores[b]; });
  std::vector<uint8_t> chosen(s.scores.size(), 0);
  int64_t keys = 0;
  for (const size_t i : ranked) {
    const int64_t with = keys + s.sizes[i];
    if (nearest ? with - wanted >= wanted - keys : keys >= wanted) break;
    chosen[i] = 1;
    keys = with;
  }
  return chosen;
}

TEST(ThresholdRule, KeepsWhatReachesIt) {
  const auto rule = make_threshold_rule({{-3, -2}, {-7, -INFINITY}});
  const Scored s = {{-2, -3, -2.5, -7, -INFINITY}, {1, 1, 1, 1, 1}};
  using Chosen = std::vector<uint8_t>;
  EXPECT_EQ(choose(*rule, s, {.scope = 0, .level = 0}), Chosen({1, 1, 1, 0, 0}));
  EXPECT_EQ(choose(*rule, s, {.scope = 0, .level = 1}), Chosen({1, 0, 0, 0, 0}));
  EXPECT_EQ(choose(*rule, s, {.scope = 1, .level = 0}), Chosen({1, 1, 1, 1, 0}));
  // T = 0 keeps every live cluster and no dead one.
  EXPECT_EQ(choose(*rule, s, {.scope = 1, .level = 1}), Chosen({1, 1, 1, 1, 0}));
}

TEST(BudgetRule, FillsTheShareNearestBestFirst) {
  for (int64_t n : {1, 2, 3, 17, 400}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const Scored s = random_scores(n, seed * 1000 + static_cast<uint64_t>(n));
      int64_t keys = 0;
      for (size_t i = 0; i < s.sizes.size(); ++i) keys += s.sizes[i];
      for (const float share : {0.0f, 0.01f, 0.125f, 0.5f, 0.99f, 1.0f}) {
        const auto rule = make_budget_rule({{0}, {0}}, {{1, 1, 1, share}, {1, 1, 1, 1}}, 2);
        const Choice choice = {.layer = 1, .kv_head = 1, .scope = 0, .keys = keys};
        const int64_t wanted = std::llround(double{share} * static_cast<double>(keys));
        EXPECT_EQ(choose(*rule, s, choice), filled(s, wanted, true))
            << "n " << n << " seed " << seed << " share " << share;
      }
    }
  }
}

TEST(BudgetRule, CoarseLevelsLetAtLeastTheShareThrough) {
  const Scored s = random_scores(200, 5);
  int64_t keys = 0;
  for (const uint32_t size : s.sizes) keys += size;
  const int64_t wanted = std::llround(0.4 * static_cast<double>(keys));
  const Choice choice = {.layer = 0, .kv_head = 0, .level = 0, .finest = false, .keys = keys};
  const auto strict = make_budget_rule({{-1, 0}, {-1, 0}}, {{0.4f}, {0.4f}}, 1);
  EXPECT_EQ(choose(*strict, s, choice), filled(s, wanted, false));
  // A threshold that lets more through than the share stays as it is.
  const auto loose = make_budget_rule({{-11, 0}, {-11, 0}}, {{0.4f}, {0.4f}}, 1);
  const auto threshold = make_threshold_rule({{-11, 0}, {-11, 0}});
  EXPECT_EQ(choose(*loose, s, choice), choose(*threshold, s, choice));
}

TEST(TopRule, KeepsTheBestLowerIndexFirst) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Scored s = random_scores(100, seed);
    s.sizes.assign(s.sizes.size(), 1);  // filled() then counts clusters
    for (const int64_t count : {0, 1, 7, 60, 100}) {
      EXPECT_EQ(choose(*make_top_rule({count}), s, {}), filled(s, count, true))
          << seed << " " << count;
    }
  }
}

// By full sort: best first, lower index first among equals, until what is left out is small enough.
TEST(MassRule, ReadsUntilTheShareIsThere) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    Scored s = random_scores(500, seed);
    testing::Random random(seed + 1000);
    for (float& score : s.scores)
      score -= static_cast<float>(random.below(seed % 2 * 4000 + 1)) / 99;
    double total = 0;
    for (size_t i = 0; i < s.scores.size(); ++i)
      total += s.sizes[i] * std::exp(double{s.scores[i]});
    // Exact keys have a fifth of the attention.
    for (float& score : s.scores) score += static_cast<float>(std::log(0.8 / total));
    for (const bool finest : {true, false}) {
      const double share = 0.98, mass = 0.9;
      const double least = finest ? mass : share - (share - mass) / 4;
      std::vector<size_t> ranked;
      for (size_t i = 0; i < s.scores.size(); ++i) {
        if (s.scores[i] > -INFINITY) ranked.push_back(i);
      }
      std::stable_sort(ranked.begin(), ranked.end(),
                       [&](size_t a, size_t b) { return s.scores[a] > s.scores[b]; });
      std::vector<uint8_t> expected(s.scores.size(), 0);
      double left_out = 0.8;
      for (const size_t i : ranked) {
        if (share * (1 - left_out) >= least) break;
        expected[i] = 1;
        left_out -= s.sizes[i] * std::exp(double{s.scores[i]});
      }
      const Choice choice = {
          .finest = finest, .scores = s.scores, .sizes = s.sizes, .share = share};
      const auto chosen = choose(*make_mass_rule(mass), s, choice);
      EXPECT_EQ(chosen, expected);
      EXPECT_NEAR(chosen_share(choice, chosen), share * (1 - left_out), 1e-5);
    }
  }
}

// Exact keys alone may have the share, and what a coarser level let through may not.
TEST(MassRule, NothingAndEverything) {
  const Scored s = {{-3, -4, -INFINITY}, {2, 1, 5}};
  EXPECT_EQ(choose(*make_mass_rule(0.85), s, {}), (std::vector<uint8_t>{0, 0, 0}));
  EXPECT_EQ(choose(*make_mass_rule(1), s, {}), (std::vector<uint8_t>{1, 1, 0}));
  EXPECT_EQ(choose(*make_mass_rule(0.9), s, {.share = 0.9}), (std::vector<uint8_t>{1, 1, 0}));
}

}  // namespace
}  // namespace sqz
