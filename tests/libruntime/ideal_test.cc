// The selector `ideal`: exactly the keys whose attention weight passes, in either partition.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/libruntime/selection.h"

namespace sqz {
namespace {

using testing::Served;
using testing::TinyIndexOptions;

constexpr SelectorKind kIdeal = SelectorKind::kIdeal;

TinyIndexOptions shape(int64_t page_size) {
  return {.layers = 1,
          .query_heads = 6,
          .kv_heads = 2,
          .head_dim = 32,
          .tokens = 700,
          .sink = 3,
          .tail = 20,
          .clusters = {6, 40},
          .page_size = page_size,
          .key_calibration = true};
}

// log of the mean over tokens and heads of the softmax over the clustered keys, written out.
std::vector<double> log_weights(const Served& served, int64_t head,
                                const std::vector<float>& queries, int64_t tokens) {
  const LayerView& view = served.index->layers[0];
  const int64_t d = view.head_dim, rows = tokens * served.group();
  std::vector<double> mean(view.slots, 0.0);
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<double> weight;
    double total = 0;
    for (int64_t slot = 0; slot < view.slots; ++slot) {
      weight.push_back(
          std::exp(served.scale() * reference::dot(queries.data() + r * d, view.dtype, view.keys,
                                                   head * view.slots + slot, d)));
      total += weight.back();
    }
    for (int64_t slot = 0; slot < view.slots; ++slot) {
      mean[slot] += weight[slot] / total / static_cast<double>(rows);
    }
  }
  for (double& x : mean) x = std::log(x);
  return mean;
}

class Ideal : public ::testing::TestWithParam<int64_t> {};  // page size; 0 = clusters

TEST_P(Ideal, AtThresholdTItKeepsExactlyTheKeysAboveT) {
  const Served served = testing::serve(shape(GetParam()));
  int64_t kept = 0, compared = 0, close = 0;
  for (const double t : {1e-3, 3e-3, 1e-2}) {
    const auto session = testing::open_session(
        served, testing::session_options({.selector = kIdeal, .thresholds = &t}));
    ASSERT_NE(session, nullptr);
    for (const int64_t tokens : {1, 4, 40}) {
      // However many tokens follow, the first selects for itself.
      const auto all = testing::make_queries(served, 0, tokens, 9);
      const std::vector<float> queries(all.begin(), all.begin() + std::ssize(all) / tokens);
      const auto slots = testing::selected_slots(*session, 0, all);
      for (int64_t head = 0; head < 2; ++head) {
        const auto expected =
            log_weights(served, head, testing::group_of(served, queries, 0, 1, head), 1);
        for (size_t slot = 0; slot < expected.size(); ++slot) {
          if (std::abs(expected[slot] - std::log(t)) < 2e-5) {
            ++close;
            continue;
          }
          ++compared;
          ASSERT_EQ(slots[head][slot], expected[slot] >= std::log(t))
              << "T " << t << " tokens " << tokens << " head " << head << " slot " << slot;
          kept += slots[head][slot];
        }
      }
      testing::expect_attention(served, *session, 0, queries, slots);
    }
  }
  EXPECT_LT(close, 20);
  EXPECT_GT(kept, compared / 50);
  EXPECT_LT(kept, compared / 2);
}

TEST_P(Ideal, EveryTokenSelectsForItself) {
  const Served served = testing::serve(shape(GetParam()));
  const double t = 3e-3;
  const auto session = testing::open_session(
      served, testing::session_options({.selector = kIdeal, .thresholds = &t}));
  ASSERT_NE(session, nullptr);
  const int64_t tokens = 12;
  const auto all = testing::make_queries(served, 0, tokens, 9);
  const auto together = testing::attend(*session, 0, all);
  ASSERT_TRUE(together.ok()) << together.status().message();
  const int64_t row = std::ssize(all) / tokens;
  for (int64_t token = 0; token < tokens; ++token) {
    const auto alone =
        testing::attend(*session, 0, {all.begin() + token * row, all.begin() + (token + 1) * row});
    ASSERT_TRUE(alone.ok()) << alone.status().message();
    for (int64_t i = 0; i < row; ++i) {
      ASSERT_NEAR(together->out[token * row + i], alone->out[i], 1e-5) << token << " " << i;
    }
  }
}

TEST_P(Ideal, TheRuleBudgetKeepsTheBestKeys) {
  const Served served = testing::serve(shape(GetParam()));
  const auto session = testing::open_session(
      served,
      testing::session_options({.selector = kIdeal, .rule = RuleKind::kBudget, .keep = 0.125}));
  ASSERT_NE(session, nullptr);
  const auto queries = testing::make_queries(served, 0, 1, 9);
  const auto slots = testing::selected_slots(*session, 0, queries);
  for (int64_t head = 0; head < 2; ++head) {
    // The tiny index calibrates every head alike: 677 / 8 keys.
    EXPECT_EQ(std::count(slots[head].begin(), slots[head].end(), true), 85);
    const auto weights =
        log_weights(served, head, testing::group_of(served, queries, 0, 1, head), 1);
    double least_kept = 0, best_dropped = -1e30;
    for (size_t slot = 0; slot < weights.size(); ++slot) {
      if (slots[head][slot]) {
        least_kept = std::min(least_kept, weights[slot]);
      } else {
        best_dropped = std::max(best_dropped, weights[slot]);
      }
    }
    EXPECT_GE(least_kept, best_dropped - 1e-5);
  }
  EXPECT_NEAR(session->plan().asked_budget, (23 + 677 * 0.125) / 700, 1e-12);
}

TEST_P(Ideal, TheCalibratedThresholdIsThatOfTheScope) {
  const Served served = testing::serve(shape(GetParam()));
  const auto session =
      testing::open_session(served, testing::session_options({.selector = kIdeal, .budget = 0.2}));
  ASSERT_NE(session, nullptr);
  const double keep = (0.2 * 700 - 23) / 677;
  EXPECT_NEAR(session->plan().asked_keep, keep, 1e-12);
  ASSERT_EQ(session->plan().log_thresholds.size(), 2u);
  for (const auto& scope : session->plan().log_thresholds) {
    ASSERT_EQ(scope.size(), 1u);
    EXPECT_NEAR(scope[0], -20 * keep, 1e-4);  // as tiny_index.h calibrates
  }
}

TEST_P(Ideal, RefusesWhatItCannotServe) {
  TinyIndexOptions without = shape(GetParam());
  without.key_calibration = false;
  const Served plain = testing::serve(without);
  const Status status = testing::refusal(plain, {.selector = kIdeal, .keep = 0.2});
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.message().find("--calibrate-keys"), std::string::npos) << status.message();
  const double threshold = 0.1;
  EXPECT_TRUE(testing::refusal(plain, {.selector = kIdeal, .thresholds = &threshold}).ok());
  const Served served = testing::serve(shape(GetParam()));
  const SelectionRequest bad[] = {{.selector = kIdeal},
                                  {.selector = kIdeal, .group = GroupPolicy::kMax, .keep = 0.2},
                                  {.selector = kIdeal, .levels = 1, .keep = 0.2}};
  for (const auto& request : bad) {
    EXPECT_EQ(testing::refusal(served, request).code(), Code::kInvalidArgument) << &request - bad;
  }
}

INSTANTIATE_TEST_SUITE_P(Partitions, Ideal, ::testing::Values(0, 16));

}  // namespace
}  // namespace sqz
