// One suite for all selectors. What they select is checked by the property test; here is what it
// does not draw: what is refused, equal scores, numbers that are not finite, damage, arithmetic.
#include <gmock/gmock.h>

#include <cmath>
#include <map>
#include <numeric>
#include <regex>

#include "libruntime/select/layer_spread.h"
#include "libruntime/select/score.h"
#include "tests/common/tiny_buckets.h"
#include "tests/libruntime/selection.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::Served;
using testing::TinyIndexOptions;
using Kind = SelectorKind;
using Scales = std::vector<double>;

enum class Of { kClusters, kPlain, kLong, kPages, kLongPages, kBuckets };

// Two layers of 4 query and 2 KV heads of 16 dimensions, both sparse but the first of buckets.
Served make_index(Of of) {
  if (of == Of::kBuckets) {
    const testing::TemporaryDirectory directory;
    const QmodelFile qmodel = testing::tiny_qmodel({.head_dim = 16, .buckets = 12, .hidden = 21});
    EXPECT_TRUE(testing::write_tiny_buckets(directory.file("x"), qmodel, 5000).ok());
    const auto index = make_served_index(*SqzFile::open(directory.file("x"), OpenMode::kRead));
    return {{.head_dim = 16, .tokens = 5000, .sink = 1, .tail = 99}, *index};
  }
  const bool paged = of == Of::kPages || of == Of::kLongPages;
  const bool is_long = of == Of::kLong || of == Of::kLongPages;
  return testing::serve({.head_dim = 16,
                         .tokens = is_long ? 5000 : 700,
                         .sink = 3,
                         .tail = 20,
                         .clusters = {6, 40},
                         .page_size = paged ? 16 : 0,
                         .heavy_hitters = of == Of::kClusters});
}

const Served& index_of(Of of) {
  static std::map<Of, Served> made;
  if (!made.contains(of)) made[of] = make_index(of);
  return made[of];
}

// A selector on the index that it is for.
struct Row {
  const char* name;
  Kind kind;
  Of of;
  RuleKind rule = RuleKind::kBudget;
  bool levels = false;  // takes levels and thresholds
};
const Row kRows[] = {
    {.name = "squeezed", .kind = Kind::kSqueezed, .of = Of::kClusters, .levels = true},
    {.name = "quest", .kind = Kind::kQuest, .of = Of::kPages},
    {.name = "saap", .kind = Kind::kSaap, .of = Of::kBuckets},
    {.name = "stream", .kind = Kind::kStream, .of = Of::kClusters},
    {.name = "window", .kind = Kind::kWindow, .of = Of::kClusters},
    {.name = "h2o", .kind = Kind::kH2o, .of = Of::kClusters}};

class Selectors : public ::testing::TestWithParam<Row> {
 protected:
  SelectionRequest request(double keep) const {
    return {.selector = GetParam().kind, .rule = GetParam().rule, .keep = keep, .dense_layers = -1};
  }
  const Served& served() const { return index_of(GetParam().of); }
};

TEST_P(Selectors, RefusesRequestsThatMakeNoSense) {
  const double thresholds[] = {0.1, 0.1}, negative[] = {-0.1, 0.1}, nan[] = {NAN, 0.1};
  static const Scales short_of = {1}, zero = {1, 0}, not_a_number = {NAN, 1}, alike = {1, 1};
  using Change = void (*)(SelectionRequest&);
  const Change changes[] = {[](auto& r) { r.keep = 0; },
                            [](auto& r) { r.budget = 0.3; },
                            [](auto& r) { r.keep = -0.5; },
                            [](auto& r) { r.keep = 1.5; },
                            [](auto& r) { r.keep = NAN; },
                            [](auto& r) { r.keep = 0, r.budget = 1.01; },
                            [](auto& r) { r.levels = 3; },
                            [](auto& r) { r.levels = -1; },
                            [](auto& r) { r.dense_layers = 3; },
                            [](auto& r) { r.dense_layers = -2; },
                            [](auto& r) { r.layer_scales = short_of; },
                            [](auto& r) { r.layer_scales = zero; },
                            [](auto& r) { r.layer_scales = not_a_number; }};
  EXPECT_EQ(testing::refusal(served(), request(0.3)).code(), Code::kOk);
  for (const Change& change : changes) {
    SelectionRequest bad = request(0.3);
    change(bad);
    EXPECT_EQ(testing::refusal(served(), bad).code(), Code::kInvalidArgument) << &change - changes;
  }
  SelectionRequest flat = request(0.3);
  flat.levels = 1;
  EXPECT_EQ(testing::refusal(served(), flat).ok(), GetParam().levels);
  SelectionRequest given = request(0);
  given.rule = RuleKind::kThreshold;
  given.thresholds = thresholds;
  EXPECT_EQ(testing::refusal(served(), given).ok(), GetParam().levels);
  for (const double* bad : {negative, nan}) {
    given.thresholds = bad;
    EXPECT_EQ(testing::refusal(served(), given).code(), Code::kInvalidArgument);
  }
  given.thresholds = thresholds;
  given.layer_scales = alike;
  EXPECT_EQ(testing::refusal(served(), given).code(), Code::kInvalidArgument);
  SelectionRequest one = request(0.3);
  one.rule = RuleKind::kThreshold;
  one.layer_scales = alike;
  EXPECT_EQ(testing::refusal(served(), one).ok(), !GetParam().levels);
  given.layer_scales = {};
  given.rule = RuleKind::kBudget;  // thresholds imply the rule
  EXPECT_EQ(testing::refusal(served(), given).ok(), GetParam().levels);
}

TEST_P(Selectors, FiniteQueriesWhoseScoresAreNot) {
  const auto session = testing::open_session(served(), testing::session_options(request(0.3)));
  const std::vector<float> huge(4 * 16, 3e38f);
  const std::vector<int64_t> positions = {5000};
  EXPECT_EQ(testing::attend(*session, 1, huge, {.positions = positions}).status().code(),
            Code::kNumeric);
}

// With queries of 0 all keys are alike, and the first ones are read.
TEST_P(Selectors, EqualScoresAreTakenInOrder) {
  const Kind kind = GetParam().kind;
  if (kind != Kind::kSqueezed && kind != Kind::kQuest) return;
  SelectionRequest flat = request(0.25);
  if (GetParam().levels) flat.levels = 1;
  const auto session = testing::open_session(served(), testing::session_options(flat));
  const std::vector<float> zeros(4 * 16);
  for (const auto& slots : testing::selected_slots(*session, 0, zeros)) {
    const auto first_miss = std::find(slots.begin(), slots.end(), false) - slots.begin();
    EXPECT_EQ(std::count(slots.begin(), slots.end(), true), first_miss);
    EXPECT_NEAR(static_cast<double>(first_miss), 677 / 4, 40);
  }
}

// Less than the least budget is refused on a long context, and its message has the least one.
TEST_P(Selectors, ABudgetThatCannotBeMetIsRefusedWithTheLeast) {
  const Of of = GetParam().of == Of::kPages      ? Of::kLongPages
                : GetParam().of == Of::kClusters ? Of::kLong
                                                 : Of::kBuckets;
  if (GetParam().kind == Kind::kH2o) return;  // not in kLong
  SelectionRequest low = request(0);
  low.budget = 0.001;
  const Status status = testing::refusal(index_of(of), low);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("budget: found 0.001, expected "));
  std::smatch number;
  const std::string message = status.message();
  ASSERT_TRUE(std::regex_search(message, number, std::regex("(?:than|least) ([0-9.]+)")))
      << message;
  low.budget = std::stod(number[1]) * 1.01;
  EXPECT_TRUE(testing::refusal(index_of(of), low).ok()) << status.message();
}

INSTANTIATE_TEST_SUITE_P(All, Selectors, ::testing::ValuesIn(kRows),
                         [](const auto& row) { return row.param.name; });

TEST(Selector, RefusesAnIndexThatItCannotServe) {
  struct Case {
    Of of;
    Kind kind;
    const char* words;
  };
  const Case cases[] = {
      {Of::kClusters, Kind::kQuest, "partition: found kmeans, expected pages"},
      {Of::kClusters, Kind::kSaap, "partition: found kmeans, expected buckets"},
      {Of::kPages, Kind::kSqueezed, "partition: found pages, expected kmeans"},
      {Of::kBuckets, Kind::kSqueezed, "partition: found buckets, expected kmeans"},
      {Of::kPlain, Kind::kH2o, "order of heavy hitters: found none"}};
  for (const auto& [of, kind, words] : cases) {
    const Status status = testing::refusal(index_of(of), {.selector = kind, .keep = 0.3});
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr(words));
  }
  EXPECT_EQ(testing::refusal(index_of(Of::kPlain), {.selector = Kind::kDense, .keep = 0.3}).code(),
            Code::kInvalidArgument);
}

// A damaged order would lead beyond the slots, or never end.
TEST(Selector, RefusesADamagedOrderOfHeavyHitters) {
  const Served& served = index_of(Of::kClusters);
  for (const uint32_t slot : {677u, 0xffffffffu, served.index->layers[1].heavy[4]}) {
    ServedIndex damaged = *served.index;
    const LayerView& view = damaged.layers[1];
    std::vector<uint32_t> heavy(view.heavy, view.heavy + 2 * view.slots);
    heavy[5] = slot;
    damaged.layers[1].heavy = heavy.data();
    const auto session =
        Session::create(std::make_shared<const ServedIndex>(damaged),
                        testing::session_options({.selector = Kind::kH2o, .budget = 0.2}));
    ASSERT_FALSE(session.ok());
    EXPECT_EQ(session.status().code(), Code::kCorrupt);
    EXPECT_THAT(session.status().message(), HasSubstr(concat("layers.1.heavy[5]: found ", slot)));
  }
}

TEST(Selector, SaapNeedsPositionsOrQueriesBeforeRope) {
  const auto session = testing::open_session(
      index_of(Of::kBuckets), testing::session_options({.selector = Kind::kSaap, .keep = 0.3}));
  const std::vector<float> q = testing::Random(1).normals(4 * 16);
  const Status status = testing::attend(*session, 1, q).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("positions: found null"));
  EXPECT_TRUE(testing::attend(*session, 0, q).ok()) << "the dense layer needs none";
}

// ---- Arithmetic.

TEST(LayerKeys, SumIsExactForEveryTotalAndScale) {
  testing::Random random(3);
  for (int round = 0; round < 300; ++round) {
    const int64_t layers = 2 + random.below(9), slots = 1 + random.below(300);
    SelectionPlan plan;
    plan.asked_keep = static_cast<double>(random.below(1000)) / 1000;
    int64_t spread = 0;
    for (int64_t l = 0; l < layers; ++l) {
      const int64_t scale = random.below(5) == 0 ? 0 : 5 + random.below(300);
      plan.layer_keep.push_back(0.01 * static_cast<double>(scale));
      spread += scale > 0;
    }
    const auto keys = layer_keys(plan, slots);
    ASSERT_EQ(std::accumulate(keys.begin(), keys.end(), int64_t{0}),
              spread * static_cast<int64_t>(plan.asked_keep * static_cast<double>(slots) + 1e-6));
    for (size_t l = 0; l < keys.size(); ++l) {
      ASSERT_GE(keys[l], 0);
      ASSERT_LE(keys[l], plan.layer_keep[l] > 0 ? slots : 0);
    }
  }
}

// Nothing depends on what the workspace held before, either.
TEST(Score, EmptyClustersAndNumbersThatAreNotFinite) {
  std::vector<float> centroids(3 * 3, 1);
  std::fill_n(centroids.begin() + 3, 3, NAN);  // of the second cluster
  const ClusterRange all = {0, 3};
  for (const int64_t tokens : {1, 40}) {
    for (const float query : {0.5f, NAN, INFINITY, 3e38f}) {
      const std::vector<float> queries(static_cast<size_t>(3 * tokens), query);
      for (const std::vector<uint32_t>& sizes : {std::vector<uint32_t>{2, 0, 2}, {0, 0, 0}}) {
        const ScoreProblem problem = {.dtype = DType::kF32,
                                      .dim = 3,
                                      .clusters = 3,
                                      .ranges = {&all, 1},
                                      .centroids = centroids.data(),
                                      .sizes = sizes.data(),
                                      .queries = queries.data(),
                                      .tokens = tokens,
                                      .group = 1,
                                      .scale = 1};
        std::vector<float> scores(3), workspace(score_workspace(problem), NAN);
        const Status status = score_clusters(problem, scores, workspace);
        const bool numeric = query != 0.5f && sizes[0] > 0;
        ASSERT_EQ(status.code(), numeric ? Code::kNumeric : Code::kOk) << query;
        const float score = sizes[0] > 0 ? std::log(0.25f) : -INFINITY;
        if (!numeric) {
          EXPECT_THAT(scores, ::testing::ElementsAre(::testing::FloatEq(score), -INFINITY,
                                                     ::testing::FloatEq(score)));
        }
      }
    }
  }
}

// One query is multiplied with 1,024 centroids at a time.
TEST(Score, ThousandsOfClusters) {
  std::vector<float> centroids(2500);
  std::iota(centroids.begin(), centroids.end(), 0.0f);
  const std::vector<uint32_t> sizes(centroids.size(), 1);
  const ClusterRange all = {0, 2500};
  const float query = 1;
  const ScoreProblem problem = {.dtype = DType::kF32,
                                .dim = 1,
                                .clusters = 2500,
                                .ranges = {&all, 1},
                                .centroids = centroids.data(),
                                .sizes = sizes.data(),
                                .queries = &query,
                                .tokens = 1,
                                .group = 1,
                                .scale = 0.001f};
  std::vector<float> scores(2500), workspace(score_workspace(problem), NAN);
  ASSERT_TRUE(score_clusters(problem, scores, workspace).ok());
  double sum = 0;
  for (const float logit : centroids) sum += std::exp(0.001 * logit);
  for (size_t i = 0; i < scores.size(); ++i) {
    ASSERT_NEAR(scores[i], 0.001 * centroids[i] - std::log(sum), 1e-5) << i;
  }
}

// A file of as many buckets has 16 MB.
TEST(Score, ManyBucketsTakeLittleMemoryAThread) {
  const ClassifierView network = {.hidden = 1};
  ScoreProblem problem;
  problem.dim = 1;
  problem.group = 8;
  problem.clusters = 1 << 20;
  problem.network = &network;
  EXPECT_LT(4 * most_score_workspace(problem), 32 << 20);
}

TEST(CalibratedThreshold, AtTheEndsOfTheGrid) {
  constexpr int64_t kLast = Calibration::kGrid - 1;
  std::vector<float> grid(Calibration::kGrid);
  for (int64_t i = 1; i < kLast; ++i) grid[i] = -static_cast<float>(i) / 100;
  grid[0] = 1;  // above every score
  for (const float lowest : {-3e38f, -INFINITY}) {
    grid[kLast] = lowest;
    const auto at = [&](double place) { return calibrated_threshold(grid.data(), place / kLast); };
    EXPECT_EQ(at(0), 1);
    EXPECT_EQ(at(0.3), grid[1]);
    EXPECT_NEAR(at(2.25), -0.0225, 1e-6);
    EXPECT_EQ(at(kLast - 0.5), grid[kLast - 1]);
    EXPECT_EQ(at(kLast), lowest);
  }
}

}  // namespace
}  // namespace sqz
