// The selector `h2o`: recent keys and heavy hitters, half and half.
#include <gmock/gmock.h>

#include "tests/libruntime/selection.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::Served;
using testing::TinyIndexOptions;

constexpr SelectorKind kH2o = SelectorKind::kH2o;

TinyIndexOptions shape() {
  return {.layers = 2,
          .query_heads = 4,
          .kv_heads = 2,
          .head_dim = 16,
          .tokens = 700,
          .sink = 3,
          .tail = 20,
          .clusters = {6, 40},
          .heavy_hitters = true};
}

TEST(H2o, ReadsRecentKeysAndTheHeaviestOfTheOthers) {
  const Served served = testing::serve(shape());
  for (const double budget : {0.0343, 0.1, 0.5, 0.999}) {
    const auto session = testing::open_session(
        served, testing::session_options({.selector = kH2o, .budget = budget}));
    ASSERT_NE(session, nullptr);
    const auto count = static_cast<int64_t>(budget * 700 + 1e-6) - 23;  // clustered keys
    const int64_t recent = count - count / 2;
    for (int64_t layer = 0; layer < 2; ++layer) {
      const LayerView& view = served.index->layers[layer];
      const auto queries = testing::make_queries(served, layer, 3, 5);
      const auto slots = testing::selected_slots(*session, layer, queries);
      for (int64_t head = 0; head < 2; ++head) {
        const uint32_t* positions = view.positions + head * view.slots;
        const uint32_t* heavy = view.heavy + head * view.slots;
        std::vector<bool> expected(static_cast<size_t>(view.slots), false);
        int64_t more = count / 2;
        for (int64_t rank = 0; rank < view.slots; ++rank) {  // heaviest first
          const bool is_recent = positions[heavy[rank]] >= 680 - recent;
          expected[heavy[rank]] = is_recent || more > 0;
          if (!is_recent) --more;
        }
        EXPECT_EQ(slots[head], expected) << "budget " << budget;
      }
      testing::expect_attention(served, *session, layer, queries, slots);
      EXPECT_LE(testing::delivered(*session, layer), budget);
      EXPECT_GT(testing::delivered(*session, layer), budget - 1.0 / 700);
    }
  }
}

TEST(H2o, EachLayerHasItsOwnBudget) {
  const Served served = testing::serve(shape());
  const std::vector<double> scales = {1, 3};
  const auto session = testing::open_session(
      served, testing::session_options({.selector = kH2o, .budget = 0.25, .layer_scales = scales}));
  for (const auto& [layer, keys] : {std::pair(0, 76), std::pair(1, 228)}) {  // 152 on average
    const auto slots =
        testing::selected_slots(*session, layer, testing::make_queries(served, layer, 1, 5));
    for (const auto& head : slots) EXPECT_EQ(std::count(head.begin(), head.end(), true), keys);
  }
}

TEST(H2o, RefusesAnIndexWithoutTheOrder) {
  TinyIndexOptions without = shape();
  without.heavy_hitters = false;
  const Status status =
      testing::refusal(testing::serve(without), {.selector = kH2o, .budget = 0.2});
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("order of heavy hitters: found none"));
  const double threshold = 0.1;
  const SelectionRequest bad[] = {{.selector = kH2o},
                                  {.selector = kH2o, .levels = 1, .keep = 0.2},
                                  {.selector = kH2o, .thresholds = &threshold}};
  for (const auto& request : bad) {
    EXPECT_EQ(testing::refusal(testing::serve(shape()), request).code(), Code::kInvalidArgument);
  }
}

// An order that is none would lead beyond the slots, or never end.
TEST(H2o, RefusesAnOrderThatIsDamaged) {
  const Served served = testing::serve(shape());
  for (const uint32_t slot : {677u, 0xffffffffu, served.index->layers[1].heavy[4]}) {
    ServedIndex damaged = *served.index;
    const LayerView& view = damaged.layers[1];
    std::vector<uint32_t> heavy(view.heavy, view.heavy + 2 * view.slots);
    heavy[5] = slot;
    damaged.layers[1].heavy = heavy.data();
    const auto index = std::make_shared<const ServedIndex>(damaged);
    const auto session =
        Session::create(index, testing::session_options({.selector = kH2o, .budget = 0.2}));
    ASSERT_FALSE(session.ok());
    EXPECT_EQ(session.status().code(), Code::kCorrupt);
    EXPECT_THAT(session.status().message(), HasSubstr(concat("layers.1.heavy[5]: found ", slot)));
  }
}

}  // namespace
}  // namespace sqz
