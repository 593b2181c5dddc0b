// Pruned indexes serve their policy with the same bits, and nothing else.
#include "libindex/prune.h"

#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "tests/libruntime/selection.h"

namespace sqz {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Served;
using testing::TinyIndexOptions;

TinyIndexOptions shape() {
  return {.layers = 3,
          .query_heads = 4,
          .kv_heads = 2,
          .head_dim = 16,
          .tokens = 700,
          .sink = 13,
          .tail = 20,
          .clusters = {6, 40},
          .heavy_hitters = true};
}

class Prune : public ::testing::Test {
 protected:
  std::string index(const TinyIndexOptions& o) {
    const std::string path = directory_.file("whole.sqz");
    EXPECT_TRUE(testing::write_tiny_index(path, o).ok());
    return path;
  }
  Result<PruneReport> prune(const std::string& from, const SelectionRequest& policy) {
    auto file = SqzFile::open(from, OpenMode::kRead);
    EXPECT_TRUE(file.ok()) << file.status().message();
    return prune_index(Env::posix(), *file, policy, output(), false, 1);
  }
  std::string refused(const std::string& from, const SelectionRequest& policy, Code code) {
    const auto report = prune(from, policy);
    EXPECT_EQ(report.status().code(), code) << report.status().message();
    EXPECT_FALSE(Env::posix().exists(output())) << "nothing half-written";
    return report.status().message();
  }
  std::string output() const { return directory_.file("pruned.sqz"); }
  static Served serve(const std::string& path, const TinyIndexOptions& o) {
    const auto file = SqzFile::open(path, OpenMode::kRead);
    EXPECT_TRUE(file.ok()) << file.status().message();
    const auto index = make_served_index(*file);
    EXPECT_TRUE(index.ok()) << index.status().message();
    return {o, *index};
  }

  testing::TemporaryDirectory directory_;
};

// With a budget for each layer; the property test draws the rest.
TEST_F(Prune, GivesTheSameBitsUnderItsPolicy) {
  const std::vector<double> scales = {1, 3, 2};
  TinyIndexOptions o = shape();
  o.windows = {{2, 50}};
  for (const auto selector : {SelectorKind::kStream, SelectorKind::kWindow, SelectorKind::kH2o}) {
    const std::string path = index(o);
    const SelectionRequest policy{.selector = selector, .budget = 0.2, .layer_scales = scales};
    const auto report = prune(path, policy);
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->bytes, std::filesystem::file_size(output()));
    // The third layer has a window: the two others share.
    const double keep = (0.2 * 700 - (selector == SelectorKind::kWindow ? 20 : 33)) / 667;
    const auto each = static_cast<int64_t>(keep * 667 + 1e-6);
    EXPECT_THAT(report->kept, ElementsAre(each - each / 2, each + each / 2, 0));
    const Served whole = serve(path, o), pruned = serve(output(), o);
    EXPECT_EQ(pruned.index->file->verify().message(), "");
    const auto before = testing::open_session(whole, testing::session_options(policy));
    const auto after = testing::open_session(
        pruned, testing::session_options({.selector = selector, .budget = 0.2}));
    ASSERT_NE(after, nullptr);
    for (int64_t layer = 0; layer < 3; ++layer) {
      const auto queries = testing::make_queries(whole, layer, 3, 5);
      const testing::CallOptions call = {.positions = {700, 701, 702}};
      EXPECT_EQ(testing::attend(*before, layer, queries, call).value(),
                testing::attend(*after, layer, queries, call).value())
          << "layer " << layer;
      EXPECT_DOUBLE_EQ(testing::delivered(*before, layer), testing::delivered(*after, layer));
    }
    EXPECT_EQ(after->plan().asked_budget, 0.2);
    EXPECT_EQ(fitting_selector(pruned.index->metadata()), selector);
    EXPECT_TRUE(Env::posix().remove(output()).ok());
  }
}

TEST_F(Prune, TakesTheRoomOfTheBudget) {
  TinyIndexOptions o = shape();
  o.tokens = 8000;
  o.layers = 2;
  o.clusters = {20, 400};
  const std::string path = index(o);
  const auto report = prune(path, {.selector = SelectorKind::kH2o, .budget = 0.1});
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_THAT(report->kept, ElementsAre(767, 767));
  // Keys, values and positions of a tenth, and the header and paddings.
  EXPECT_LT(report->bytes, std::filesystem::file_size(path) / 10 + 20000);
}

// Budgets that an index embeds decide which keys stay, and are of no use to the pruned index.
TEST_F(Prune, EmbeddedBudgetsAreSpent) {
  TinyIndexOptions o = shape();
  o.layer_budgets = {70, 210, 140};
  const std::string path = index(o);
  const auto report = prune(path, {.selector = SelectorKind::kStream, .budget = 0.2});
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_THAT(report->kept, ElementsAre(54, 160, 107));  // 107 a layer on average
  const auto file = SqzFile::open(output());
  ASSERT_TRUE(file.ok());
  EXPECT_FALSE((*file)->metadata().layer_budgets.has_value());
  EXPECT_TRUE(Env::posix().remove(output()).ok());
  const auto alike =
      prune(path, {.selector = SelectorKind::kStream, .budget = 0.2, .uniform_layers = true});
  EXPECT_THAT(alike->kept, ElementsAre(107, 107, 107));
}

TEST_F(Prune, ServesNothingElse) {
  const TinyIndexOptions o = shape();
  ASSERT_TRUE(prune(index(o), {.selector = SelectorKind::kH2o, .budget = 0.2}).ok());
  const Served pruned = serve(output(), o);
  const auto refusal = [&](const SelectionRequest& request) {
    const Status status = testing::refusal(pruned, request);
    EXPECT_FALSE(status.ok());
    return status.message();
  };
  for (const auto selector :
       {SelectorKind::kSqueezed, SelectorKind::kQuest, SelectorKind::kStream}) {
    EXPECT_THAT(refusal({.selector = selector, .budget = 0.2}),
                HasSubstr("pruned for selector h2o"));
  }
  EXPECT_THAT(refusal({.selector = SelectorKind::kDense}), HasSubstr("pruned for selector h2o"));
  using S = SelectionRequest;
  constexpr auto kH2o = SelectorKind::kH2o;
  const std::vector<double> scales = {1, 1, 2};
  EXPECT_THAT(refusal(S{.selector = kH2o, .budget = 0.3}),
              HasSubstr("budget: found 0.3, expected 0.2 or none"));
  EXPECT_THAT(refusal(S{.selector = kH2o, .keep = 0.3}), HasSubstr("keep: found 0.3"));
  EXPECT_THAT(refusal(S{.selector = kH2o, .budget = 0.2, .layer_scales = scales}),
              HasSubstr("layer_scales: found 3, expected none: each layer"));
  EXPECT_THAT(refusal(S{.selector = kH2o, .budget = 0.2, .dense_layers = 1}),
              HasSubstr("dense_layers: found 1"));
  EXPECT_NE(testing::open_session(pruned, testing::session_options({.selector = kH2o})), nullptr);
  const auto again = prune_index(Env::posix(), pruned.index->file,
                                 {.selector = kH2o, .budget = 0.2}, directory_.file("x"), false, 1);
  EXPECT_EQ(again.status().code(), Code::kUnsupported);
}

TEST_F(Prune, RefusesWhatCannotBePruned) {
  const std::string path = index(shape());
  EXPECT_THAT(refused(path, {.budget = 0.2}, Code::kInvalidArgument),
              HasSubstr("selector: found squeezed, expected window, stream or h2o"));
  constexpr auto kH2o = SelectorKind::kH2o;
  EXPECT_THAT(refused(path, {.selector = kH2o, .budget = 1}, Code::kInvalidArgument),
              HasSubstr("nothing to leave out"));
  refused(path, {.selector = kH2o}, Code::kInvalidArgument);
  refused(path, {.selector = kH2o, .budget = 0.2, .dense_layers = 1}, Code::kInvalidArgument);
  const std::vector<double> scales = {1e-6, 1, 1};
  EXPECT_THAT(refused(path, {.selector = kH2o, .budget = 0.2, .layer_scales = scales},
                      Code::kInvalidArgument),
              HasSubstr("layer 0: the budget leaves it no key"));
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-5000, std::ios::end);
  file.put('\x55');
  file.close();
  EXPECT_THAT(refused(path, {.selector = kH2o, .budget = 0.2}, Code::kCorrupt),
              HasSubstr("XXH3-64"));
}

}  // namespace
}  // namespace sqz
