// Pruned indexes serve nothing but their policy. The property test compares what they serve.
#include "libindex/prune.h"

#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "tests/common/must.h"
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
    auto file = must(SqzFile::open(from, OpenMode::kRead));
    return prune_index(Env::posix(), file, policy, output(), false, 1);
  }
  std::string refused(const std::string& from, const SelectionRequest& policy, Code code) {
    const auto report = prune(from, policy);
    EXPECT_EQ(report.status().code(), code) << report.status().message();
    EXPECT_FALSE(Env::posix().exists(output())) << "nothing half-written";
    return report.status().message();
  }
  std::string output() const { return directory_.file("pruned.sqz"); }
  static Served serve(const std::string& path, const TinyIndexOptions& o) {
    return {o, must(make_served_index(must(SqzFile::open(path, OpenMode::kRead))))};
  }

  testing::TemporaryDirectory directory_;
};

TEST_F(Prune, ServesNothingElse) {
  const TinyIndexOptions o = shape();
  const auto report = must(prune(index(o), {.selector = SelectorKind::kH2o, .budget = 0.2}));
  EXPECT_THAT(report.kept, ElementsAre(107, 107, 107));
  EXPECT_EQ(report.bytes, std::filesystem::file_size(output()));
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
