// Budgets spread over layers: the arithmetic on its own, and what sessions read by it.
#include "libruntime/select/layer_spread.h"

#include <gmock/gmock.h>

#include <cmath>
#include <numeric>

#include "tests/libruntime/selection.h"

namespace sqz {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Served;
using testing::TinyIndexOptions;
using Scales = std::vector<double>;

TinyIndexOptions shape() {
  return {.layers = 4,
          .query_heads = 4,
          .kv_heads = 2,
          .head_dim = 16,
          .tokens = 700,
          .sink = 3,
          .tail = 20,
          .clusters = {6, 40}};
}

TEST(Deal, InProportionUpToTheCaps) {
  EXPECT_THAT(deal(10, Scales{1, 3, 0}, Scales{100, 100, 100}), ElementsAre(2.5, 7.5, 0));
  // The second takes no more than 4; the others share what it leaves, 1 : 2.
  EXPECT_THAT(deal(10, Scales{1, 5, 2}, Scales{9, 4, 9}), ElementsAre(2, 4, 4));
  // One cap after another is reached.
  EXPECT_THAT(deal(10, Scales{1, 5, 3}, Scales{9, 2, 5}), ElementsAre(3, 2, 5));
  EXPECT_THAT(deal(10, Scales{1, 5}, Scales{2, 3}), ElementsAre(2, 3)) << "less than the total";
  EXPECT_THAT(deal(10, Scales{1, 0}, Scales{0, 7}), ElementsAre(0, 0));
}

TEST(LayerKeys, SumIsExactForEveryTotalAndScale) {
  testing::Random random(3);
  for (int round = 0; round < 1000; ++round) {
    const int64_t layers = 2 + random.below(9), slots = 1 + random.below(300);
    SelectionPlan plan;
    plan.asked_keep = static_cast<double>(random.below(1000)) / 1000;
    for (int64_t l = 0; l < layers; ++l) {
      plan.layer_keep.push_back(
          random.below(5) == 0 ? 0 : 0.05 + 0.01 * static_cast<double>(random.below(300)));
    }
    const auto spread = std::count_if(plan.layer_keep.begin(), plan.layer_keep.end(),
                                      [](double s) { return s > 0; });
    const auto keys = layer_keys(plan, slots);
    ASSERT_EQ(std::accumulate(keys.begin(), keys.end(), int64_t{0}),
              spread * static_cast<int64_t>(plan.asked_keep * static_cast<double>(slots) + 1e-6));
    for (size_t a = 0; a < keys.size(); ++a) {
      ASSERT_GE(keys[a], 0);
      ASSERT_LE(keys[a], plan.layer_keep[a] > 0 ? slots : 0);
      for (size_t b = 0; b < keys.size(); ++b) {  // a larger scale never gets less
        if (plan.layer_keep[a] > plan.layer_keep[b]) {
          ASSERT_GE(keys[a] + 1, keys[b]);
        }
        // Below the caps shares are proportional, but for the rounding.
        if (keys[a] < slots && keys[b] < slots && plan.layer_keep[a] > 0 &&
            plan.layer_keep[b] > 0) {
          ASSERT_NEAR(static_cast<double>(keys[a]) / plan.layer_keep[a],
                      static_cast<double>(keys[b]) / plan.layer_keep[b],
                      1 / plan.layer_keep[a] + 1 / plan.layer_keep[b]);
        }
      }
    }
  }
}

// Layers 0 and 1 keep 0.4 and 1.6 times the average, the others 1.
const Scales kScales = {0.8, 3.2, 2, 2};

SelectionRequest with(SelectorKind selector, const Scales& scales) {
  return {.selector = selector, .budget = 0.25, .layer_scales = scales};
}

std::vector<int64_t> keys_of_layers(const Served& served, const SelectionRequest& request,
                                    int64_t tokens = 1) {
  const auto session = testing::open_session(served, testing::session_options(request));
  std::vector<int64_t> out;
  for (int64_t layer = 0; session != nullptr && layer < served.options.layers; ++layer) {
    const auto slots =
        testing::selected_slots(*session, layer, testing::make_queries(served, layer, tokens, 7));
    for (const auto& head : slots) out.push_back(std::count(head.begin(), head.end(), true));
  }
  return out;
}

TEST(Spread, StreamReadsEachLayersShareToTheKey) {
  const Served served = testing::serve(shape());
  // 0.25 * 700 - 23 = 152 of 677 clustered keys, four layers: 608.
  EXPECT_THAT(keys_of_layers(served, with(SelectorKind::kStream, kScales)),
              ElementsAre(61, 61, 243, 243, 152, 152, 152, 152));
  // Three times as much would be more than there is: the others get what is left.
  SelectionRequest most = with(SelectorKind::kStream, kScales);
  most.budget = 0.8;
  const auto keys = keys_of_layers(served, most);  // 537 on average
  EXPECT_THAT(keys, ElementsAre(245, 245, 677, 677, 613, 613, 613, 613));
}

TEST(Spread, InfinityReadsALayerWholeAndLeavesTheBudgetToTheOthers) {
  const Served served = testing::serve(shape());
  const Scales scales = {INFINITY, 1, 3, 2};
  EXPECT_THAT(keys_of_layers(served, with(SelectorKind::kStream, scales)),
              ElementsAre(677, 677, 76, 76, 228, 228, 152, 152));
  SelectionRequest first = with(SelectorKind::kStream, kScales);
  first.dense_layers = 2;
  EXPECT_THAT(keys_of_layers(served, first), ElementsAre(677, 677, 677, 677, 152, 152, 152, 152));
}

TEST(Spread, QuestReadsWholePagesOfEachLayersShare) {
  TinyIndexOptions o = shape();
  o.page_size = 16;
  const Served served = testing::serve(o);
  SelectionRequest request = with(SelectorKind::kQuest, kScales);
  request.dense_layers = -1;
  // 43 pages cost 43 keys: 0.25 * 700 - 23 - 43 = 109 keys on average, 44, 174, 109, 109.
  const auto keys = keys_of_layers(served, request);
  for (const auto& [at, pages] : {std::pair(0, 2), std::pair(2, 10), std::pair(4, 6)}) {
    EXPECT_LE(keys[at], pages * 16);
    EXPECT_GT(keys[at], (pages - 1) * 16) << "the last page is shorter";
  }
}

TEST(Spread, RuleBudgetHoldsEachLayersShare) {
  const Served served = testing::serve(shape());
  for (const int levels : {1, 2}) {
    SelectionRequest request = with(SelectorKind::kSqueezed, kScales);
    request.rule = RuleKind::kBudget;
    request.levels = levels;
    const auto session = testing::open_session(served, testing::session_options(request));
    const double keep = session->plan().asked_keep;
    const auto keys = keys_of_layers(served, request);
    for (size_t i = 0; i < keys.size(); ++i) {
      const double wanted = keep * kScales[i / 2] / 2 * 677;  // calibration: all heads alike
      EXPECT_NEAR(session->plan().head_keep[0][i], wanted / 677, 1e-6);
      EXPECT_NEAR(static_cast<double>(keys[i]), wanted, 45) << "half a cluster";
    }
  }
}

// The tiny index's shares rise alike in all layers, so that a layer with x times the average has
// the threshold that x times the average has.
TEST(Spread, ThresholdsAreThoseOfTheLayersShare) {
  const Served served = testing::serve(shape());
  for (const auto selector : {SelectorKind::kSqueezed, SelectorKind::kIdeal}) {
    TinyIndexOptions o = shape();
    o.key_calibration = true;
    const Served index = testing::serve(o);
    SelectionRequest request = with(selector, kScales);
    if (selector == SelectorKind::kSqueezed) request.levels = 1;
    const auto session = testing::open_session(index, testing::session_options(request));
    const SelectionPlan& plan = session->plan();
    ASSERT_EQ(plan.layer_thresholds.size(), 2u);
    for (int64_t l = 0; l < 4; ++l) {
      const double x = plan.asked_keep * kScales[static_cast<size_t>(l)] / 2;
      const double offset = selector == SelectorKind::kSqueezed ? 1.0 : 0.0;
      EXPECT_NEAR(plan.log_threshold(0, l, plan.levels - 1), offset - 20 * x, 2e-3) << l;
      EXPECT_NEAR(plan.log_threshold(1, l, plan.levels - 1), offset - 20 * x, 2e-3) << l;
    }
  }
  // On the tree no layer keeps more than the coarse level lets through; the others get the rest.
  const Scales most = {1, 1, 1, 9};
  SelectionRequest tree = with(SelectorKind::kSqueezed, most);
  tree.budget = 0;
  tree.keep = 0.25;
  const auto session = testing::open_session(served, testing::session_options(tree));
  const auto& thresholds = session->plan().layer_thresholds[0];
  EXPECT_NEAR(thresholds[3], 1 - 20 * 0.5, 2e-3);  // of tiny_index.h's coarse_keep
  EXPECT_NEAR(thresholds[0], 1 - 20 * 0.5 / 3, 2e-3);
}

// Three layers of two heads, the first read whole. At place x of its curve a head keeps `slope` x
// of its keys, a layer's first head 0.8 times that, the second 1.2 times.
class UnlikeLayers : public ::testing::Test {
 protected:
  static constexpr int64_t kGrid = Calibration::kGrid;
  static constexpr double kSlopes[2][3] = {{1.0, 0.8, 1.2}, {1.0, 0.6, 0.6}};  // [scope][layer]

  void SetUp() override {
    metadata_.model.layers = 3;
    metadata_.model.kv_heads = 2;
    plan_.asked_keep = 0.25;
    plan_.layer_keep = {0, 0.5, 1.5};
    for (int scope = 0; scope < 2; ++scope) {
      plan_.head_keep.emplace_back();
      for (const double slope : kSlopes[scope]) {
        for (const double head : {0.8, 1.2}) {
          plan_.head_keep.back().push_back(static_cast<float>(slope * head * plan_.asked_keep));
          for (int64_t i = 0; i < kGrid; ++i) {
            shares_.push_back(static_cast<float>(std::min(1.0, slope * head * x(i))));
          }
        }
      }
      for (int64_t i = 0; i < kGrid; ++i) {
        curves_[scope].push_back(static_cast<float>(-10 * (scope + 1) * x(i)));
      }
    }
  }
  static double x(int64_t i) { return static_cast<double>(i) / static_cast<double>(kGrid - 1); }

  IndexMetadata metadata_;
  SelectionPlan plan_;
  std::vector<float> shares_, curves_[2];
};

// By hand. First scope: natural shares .2 and .3, weighted .1 and .45: of .5 in all .0909 and
// .4091, which are at .1136 and .3409 of their curves; second: .15 and .15, .075 and .225, at .125
// and .375. What the first layer has is neither dealt out nor changed.
TEST_F(UnlikeLayers, EachScopeIsSpreadByItsOwnCurves) {
  const float* curves[] = {curves_[0].data(), curves_[1].data()};
  spread_thresholds(metadata_, shares_, curves, 1, plan_);
  ASSERT_EQ(plan_.layer_thresholds.size(), 2u);
  const double expected[2][3] = {{-2.5, -1.13636, -3.40909}, {-5, -2.5, -7.5}};
  for (size_t scope = 0; scope < 2; ++scope) {
    for (size_t l = 0; l < 3; ++l) {
      EXPECT_NEAR(plan_.layer_thresholds[scope][l], expected[scope][l], 1e-4) << scope << ", " << l;
    }
  }
}

TEST_F(UnlikeLayers, HeadsKeepTheirProportionsWithinALayer) {
  spread_head_keep(metadata_, plan_);
  const double expected[2][3] = {{0.25, 0.0909091, 0.409091}, {0.25, 0.075, 0.225}};
  for (size_t scope = 0; scope < 2; ++scope) {
    for (size_t l = 0; l < 3; ++l) {
      EXPECT_NEAR(plan_.head_keep[scope][2 * l], 0.8 * expected[scope][l], 1e-6)
          << scope << ", " << l;
      EXPECT_NEAR(plan_.head_keep[scope][2 * l + 1], 1.2 * expected[scope][l], 1e-6);
    }
  }
}

TEST(Spread, SelectionFollowsTheLayersThreshold) {
  const Served served = testing::serve(shape());
  SelectionRequest request = with(SelectorKind::kSqueezed, kScales);
  request.levels = 1;
  request.budget = 0;
  request.keep = 0.5;
  const auto keys = keys_of_layers(served, request);
  request.layer_scales = {};
  const auto alike = keys_of_layers(served, request);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i < 2) {
      EXPECT_LE(keys[i], alike[i]);
    } else if (i < 4) {
      EXPECT_GE(keys[i], alike[i]);
    } else {
      EXPECT_EQ(keys[i], alike[i]);
    }
  }
  EXPECT_LT(keys[0] + keys[1], alike[0] + alike[1]);
  EXPECT_GT(keys[2] + keys[3], alike[2] + alike[3]);
}

TEST(Spread, EqualScalesChangeNothing) {
  const Served served = testing::serve(shape());
  const Scales ones(4, 7.0);
  for (const auto selector : {SelectorKind::kSqueezed, SelectorKind::kStream}) {
    for (const auto rule : {RuleKind::kThreshold, RuleKind::kBudget}) {
      SelectionRequest request = with(selector, ones);
      request.rule = rule;
      const auto a = testing::open_session(served, testing::session_options(request));
      request.layer_scales = {};
      const auto b = testing::open_session(served, testing::session_options(request));
      for (int64_t layer = 0; layer < 4; ++layer) {
        const auto queries = testing::make_queries(served, layer, 4, 11);
        EXPECT_EQ(testing::attend(*a, layer, queries).value(),
                  testing::attend(*b, layer, queries).value());
      }
    }
  }
}

TEST(Spread, WhatAnIndexEmbedsIsTheDefault) {
  TinyIndexOptions o = shape();
  o.layer_budgets = {28, 112, 70, 70};  // kScales
  const Served served = testing::serve(o);
  SelectionRequest request{.selector = SelectorKind::kStream, .budget = 0.25};
  EXPECT_THAT(keys_of_layers(served, request), ElementsAre(61, 61, 243, 243, 152, 152, 152, 152));
  request.uniform_layers = true;
  EXPECT_EQ(keys_of_layers(served, request), std::vector<int64_t>(8, 152));
  const Scales other = {1, 1, 3, 3};
  request = with(SelectorKind::kStream, other);
  EXPECT_THAT(keys_of_layers(served, request), ElementsAre(76, 76, 76, 76, 228, 228, 228, 228));
}

TEST(Spread, RefusesScalesThatMakeNoSense) {
  const Served served = testing::serve(shape());
  const auto refused = [&](const Scales& scales) {
    const Status status = testing::refusal(served, with(SelectorKind::kStream, scales));
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  EXPECT_THAT(refused({1, 2, 3}), HasSubstr("layer_scales: found 3, expected 4, one for each"));
  EXPECT_THAT(refused({1, 2, 3, 4, 5}), HasSubstr("layer_scales: found 5, expected 4"));
  EXPECT_THAT(refused({1, 0, 3, 4}), HasSubstr("layer_scales[1]: found 0, expected more than 0"));
  EXPECT_THAT(refused({1, 1, 3, -4}), HasSubstr("layer_scales[3]: found -4"));
  EXPECT_THAT(refused({1, 1, std::nan(""), 4}), HasSubstr("layer_scales[2]: found nan"));
  const double thresholds[] = {0.1, 0.1};
  const Status status =
      testing::refusal(served, {.thresholds = thresholds, .layer_scales = kScales});
  EXPECT_THAT(status.message(), HasSubstr("found thresholds"));
}

TEST(Spread, EveryLayerWholeIsDense) {
  const Served served = testing::serve(shape());
  const Scales whole(4, INFINITY);
  EXPECT_EQ(keys_of_layers(served, with(SelectorKind::kStream, whole)),
            std::vector<int64_t>(8, 677));
}

}  // namespace
}  // namespace sqz
