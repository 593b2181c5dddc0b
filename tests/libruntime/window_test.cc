// The selector `window`: the most recent keys alone.
#include <gtest/gtest.h>

#include "tests/libruntime/selection.h"

namespace sqz {
namespace {

using testing::Served;
using testing::TinyIndexOptions;

constexpr SelectorKind kWindow = SelectorKind::kWindow;

TinyIndexOptions shape(int64_t page_size) {
  return {.layers = 2,
          .query_heads = 4,
          .kv_heads = 2,
          .head_dim = 16,
          .tokens = 700,
          .sink = 13,
          .tail = 20,
          .clusters = {6, 40},
          .page_size = page_size};
}

class Window : public ::testing::TestWithParam<int64_t> {};  // page size; 0 = clusters

TEST_P(Window, ReadsTheMostRecentKeysOnly) {
  const Served served = testing::serve(shape(GetParam()));
  for (const double budget : {0.03, 0.1, 0.5, 0.97}) {
    const auto session = testing::open_session(
        served, testing::session_options({.selector = kWindow, .budget = budget}));
    ASSERT_NE(session, nullptr);
    const auto whole = static_cast<int64_t>(budget * 700 + 1e-6);
    for (int64_t layer = 0; layer < 2; ++layer) {
      const LayerView& view = served.index->layers[layer];
      const auto queries = testing::make_queries(served, layer, 3, 5);
      const auto output = testing::attend(*session, layer, queries);
      ASSERT_TRUE(output.ok()) << output.status().message();
      for (int64_t row = 0; row < std::ssize(output->lse); ++row) {
        const int64_t head = row % 4 / 2;
        // All that is read, by token: 700 - whole and later. The sink is none of it.
        reference::Selected selected;
        for (int64_t slot = 0; slot < view.slots; ++slot) {
          selected.slots.push_back(view.positions[head * view.slots + slot] >= 700 - whole);
        }
        LayerView without_sink = view;
        const int64_t skip = 13 * 16 * 2;
        std::vector<std::byte> keys, values;
        const auto* exact_keys = static_cast<const std::byte*>(view.exact_keys);
        const auto* exact_values = static_cast<const std::byte*>(view.exact_values);
        const int64_t head_bytes = view.exact * 16 * 2;
        for (int64_t h = 0; h < 2; ++h) {
          keys.insert(keys.end(), exact_keys + h * head_bytes + skip,
                      exact_keys + (h + 1) * head_bytes);
          values.insert(values.end(), exact_values + h * head_bytes + skip,
                        exact_values + (h + 1) * head_bytes);
        }
        without_sink.exact = 20;
        without_sink.exact_keys = keys.data();
        without_sink.exact_values = values.data();
        const auto expected = reference::attend(queries.data() + row * 16, without_sink, head,
                                                served.scale(), selected, false);
        ASSERT_NEAR(output->lse[row], expected.lse, 2e-5) << "row " << row;
        for (int64_t c = 0; c < 16; ++c) {
          ASSERT_NEAR(output->out[row * 16 + c], expected.out[c],
                      2e-5 * (1 + std::abs(expected.out[c])));
        }
      }
      EXPECT_NEAR(testing::delivered(*session, layer), static_cast<double>(whole) / 700, 1e-12);
    }
  }
}

TEST_P(Window, ALayerThatIsReadWholeHasItsSink) {
  const Served served = testing::serve(shape(GetParam()));
  const auto session = testing::open_session(
      served, testing::session_options({.selector = kWindow, .budget = 0.1, .dense_layers = 1}));
  const auto dense =
      testing::open_session(served, testing::session_options({.selector = SelectorKind::kDense}));
  const auto queries = testing::make_queries(served, 0, 3, 5);
  EXPECT_EQ(testing::attend(*session, 0, queries).value(),
            testing::attend(*dense, 0, queries).value());
  EXPECT_NE(testing::attend(*session, 1, queries).value(),
            testing::attend(*dense, 1, queries).value());
}

TEST_P(Window, RefusesOrReadsEverything) {
  TinyIndexOptions longer = shape(GetParam());
  longer.tokens = 5000;
  const Served served = testing::serve(longer);
  const double threshold = 0.1;
  const SelectionRequest bad[] = {{.selector = kWindow},
                                  {.selector = kWindow, .levels = 1, .keep = 0.2},
                                  {.selector = kWindow, .thresholds = &threshold}};
  for (const auto& request : bad) {
    EXPECT_EQ(testing::refusal(served, request).code(), Code::kInvalidArgument) << &request - bad;
  }
  const Status status = testing::refusal(served, {.selector = kWindow, .budget = 0.004});
  EXPECT_NE(status.message().find("more than 0.004, the cost of tail"), std::string::npos)
      << status.message();
}

INSTANTIATE_TEST_SUITE_P(Partitions, Window, ::testing::Values(0, 16));

}  // namespace
}  // namespace sqz
