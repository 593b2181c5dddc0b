// The selector `stream`: sink, tail and the most recent keys, in either partition.
#include <gtest/gtest.h>

#include "tests/libruntime/selection.h"

namespace sqz {
namespace {

using testing::Served;
using testing::TinyIndexOptions;

constexpr SelectorKind kStream = SelectorKind::kStream;

TinyIndexOptions shape(int64_t page_size) {
  return {.layers = 2,
          .query_heads = 4,
          .kv_heads = 2,
          .head_dim = 16,
          .tokens = 700,
          .sink = 3,
          .tail = 20,
          .clusters = {6, 40},
          .page_size = page_size};
}

class Stream : public ::testing::TestWithParam<int64_t> {};  // page size; 0 = clusters

TEST_P(Stream, ReadsSinkAndTheMostRecentKeysOnly) {
  const Served served = testing::serve(shape(GetParam()));
  for (const double budget : {0.0343, 0.1, 0.5, 0.999}) {
    const auto session = testing::open_session(
        served, testing::session_options({.selector = kStream, .budget = budget}));
    ASSERT_NE(session, nullptr);
    const auto whole = static_cast<int64_t>(budget * 700 + 1e-6);  // keys, sink and tail included
    for (int64_t layer = 0; layer < 2; ++layer) {
      const LayerView& view = served.index->layers[layer];
      const auto queries = testing::make_queries(served, layer, 3, 5);
      const auto slots = testing::selected_slots(*session, layer, queries);
      for (int64_t head = 0; head < 2; ++head) {
        for (int64_t slot = 0; slot < view.slots; ++slot) {
          // Read are 3 + 20 tokens at the ends, and those from this one on.
          const int64_t first = 680 - (whole - 23);
          ASSERT_EQ(slots[head][slot], view.positions[head * view.slots + slot] >= first)
              << "budget " << budget << " head " << head << " slot " << slot;
        }
      }
      testing::expect_attention(served, *session, layer, queries, slots);
      EXPECT_LE(testing::delivered(*session, layer), budget);
      EXPECT_GT(testing::delivered(*session, layer), budget - 1.0 / 700);
    }
  }
}

TEST_P(Stream, KeepCountsClusteredKeys) {
  const Served served = testing::serve(shape(GetParam()));
  const auto session =
      testing::open_session(served, testing::session_options({.selector = kStream, .keep = 0.1}));
  const auto slots = testing::selected_slots(*session, 1, testing::make_queries(served, 1, 1, 5));
  EXPECT_EQ(std::count(slots[1].begin(), slots[1].end(), true), 67);  // of 677
  EXPECT_NEAR(session->plan().asked_budget, (23 + 67.7) / 700, 1e-12);
}

TEST_P(Stream, RefusesOrReadsEverything) {
  const Served served = testing::serve(shape(GetParam()));
  const double threshold = 0.1;
  const SelectionRequest bad[] = {{.selector = kStream},
                                  {.selector = kStream, .levels = 1, .keep = 0.2},
                                  {.selector = kStream, .thresholds = &threshold}};
  for (const auto& request : bad) {
    EXPECT_EQ(testing::refusal(served, request).code(), Code::kInvalidArgument) << &request - bad;
  }
  // Too short for its sink and tail: all of it is read.
  const auto session = testing::open_session(
      served, testing::session_options({.selector = kStream, .budget = 0.03}));
  EXPECT_TRUE(session->plan().fallback);
  TinyIndexOptions longer = shape(GetParam());
  longer.tokens = 5000;
  const Status status =
      testing::refusal(testing::serve(longer), {.selector = kStream, .budget = 0.004});
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("expected more than 0.0046"), std::string::npos)
      << status.message();
}

INSTANTIATE_TEST_SUITE_P(Partitions, Stream, ::testing::Values(0, 16));

}  // namespace
}  // namespace sqz
