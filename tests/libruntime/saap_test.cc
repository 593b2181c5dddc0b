// The selectors `saap` and `kmeans` against their definitions in float64, and queries before RoPE
// in both ways.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "libruntime/rope.h"
#include "libruntime/select/classifier.h"
#include "tests/common/tiny_buckets.h"
#include "tests/libruntime/selection.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::Served;

constexpr int64_t kTokens = 5000, kDim = 16, kGroup = 2, kHeads = 2;

class Saap : public ::testing::Test {
 protected:
  void SetUp() override {
    const testing::TemporaryDirectory dir;
    testing::TinyQmodelOptions o;
    o.head_dim = kDim;
    o.buckets = 12;
    o.hidden = 21;
    qmodel_ = testing::tiny_qmodel(o);
    ASSERT_TRUE(testing::write_tiny_buckets(dir.file("x.sqz"), qmodel_, kTokens).ok());
    auto file = SqzFile::open(dir.file("x.sqz"), OpenMode::kRead);
    ASSERT_TRUE(file.ok()) << file.status().message();
    auto index = make_served_index(*file);
    ASSERT_TRUE(index.ok()) << index.status().message();
    served_.index = *index;
    served_.options.query_heads = kHeads * kGroup;
    served_.options.kv_heads = kHeads;
    served_.options.head_dim = kDim;
  }

  uint32_t size(int64_t kv_head, int64_t bucket) const {
    const LayerView& view = served_.index->layers[1];
    const uint32_t* offsets = view.bucket_offsets + kv_head * (view.buckets + 1);
    return offsets[bucket + 1] - offsets[bucket];
  }

  // Shares of one query, [C], by the formulas of qmodel_file.h.
  std::vector<double> shares(int64_t kv_head, const float* q) const {
    const QmodelLayer& layer = qmodel_.layers[1];
    const int64_t buckets = qmodel_.buckets, hidden = qmodel_.hidden;
    std::vector<double> h(static_cast<size_t>(hidden)), out(static_cast<size_t>(buckets));
    for (int64_t i = 0; i < hidden; ++i) {
      h[i] = layer.hidden_bias[kv_head * hidden + i];
      for (int64_t c = 0; c < kDim; ++c) {
        h[i] += double{layer.hidden_weight[(kv_head * hidden + i) * kDim + c]} * double{q[c]};
      }
      h[i] = std::max(h[i], 0.0);
    }
    double total = 0;
    for (int64_t b = 0; b < buckets; ++b) {
      double logit = layer.output_bias[kv_head * buckets + b];
      for (int64_t i = 0; i < hidden; ++i) {
        logit += double{layer.output_weight[(kv_head * buckets + b) * hidden + i]} * h[i];
      }
      out[b] = size(kv_head, b) * std::exp(logit);
      total += out[b];
    }
    for (double& x : out) x /= total;
    return out;
  }

  // Products of one query with the centroids, [C].
  std::vector<double> products(int64_t kv_head, const float* q) const {
    const float* centroids = qmodel_.layers[1].centroids.data() + kv_head * qmodel_.buckets * kDim;
    std::vector<double> out(static_cast<size_t>(qmodel_.buckets));
    for (size_t b = 0; b < out.size(); ++b) {
      for (int64_t c = 0; c < kDim; ++c) {
        out[b] += double{centroids[static_cast<int64_t>(b) * kDim + c]} * double{q[c]};
      }
    }
    return out;
  }

  // Best buckets first, by share over size or by product, until their keys are nearest to `wanted`.
  std::vector<bool> expected_slots(SelectorKind selector, int64_t kv_head,
                                   const std::vector<float>& before, int64_t wanted) const {
    const LayerView& view = served_.index->layers[1];
    std::vector<double> scores(static_cast<size_t>(view.buckets));
    const int64_t row = kHeads * kGroup * kDim;
    for (int64_t t = 0; t < std::ssize(before) / row; ++t) {
      for (int64_t g = 0; g < kGroup; ++g) {
        const float* q = before.data() + t * row + (kv_head * kGroup + g) * kDim;
        const auto one =
            selector == SelectorKind::kSaap ? shares(kv_head, q) : products(kv_head, q);
        for (size_t b = 0; b < scores.size(); ++b) scores[b] += one[b];
      }
    }
    const uint32_t* offsets = view.bucket_offsets + kv_head * (view.buckets + 1);
    for (int64_t b = 0; b < view.buckets && selector == SelectorKind::kSaap; ++b) {
      scores[b] /= std::max(1u, size(kv_head, b));
    }
    std::vector<int64_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
    std::vector<bool> slots(static_cast<size_t>(view.slots));
    int64_t left = wanted;
    for (const int64_t b : order) {
      const int64_t keys = size(kv_head, b);
      if (keys == 0) continue;
      if (2 * left <= keys) break;
      left -= keys;
      for (uint32_t s = offsets[b]; s < offsets[b + 1]; ++s) slots[s] = true;
      if (left <= 0) break;
    }
    return slots;
  }

  // [T, Hq, d] before RoPE, and after it at positions kTokens, kTokens + 1, ...
  struct Queries {
    std::vector<float> before, after;
    std::vector<int64_t> positions;
  };
  Queries queries(int64_t tokens, uint64_t seed) const {
    Queries q;
    q.before = testing::Random(seed).normals(tokens * kHeads * kGroup * kDim);
    q.after = q.before;
    const auto frequencies = rope_frequencies(qmodel_.model.rope, kDim);
    for (int64_t t = 0; t < tokens; ++t) {
      q.positions.push_back(kTokens + t);
      for (int64_t head = 0; head < kHeads * kGroup; ++head) {
        float* row = q.after.data() + (t * kHeads * kGroup + head) * kDim;
        for (int64_t i = 0; i < kDim / 2; ++i) {
          const double angle = static_cast<double>(kTokens + t) * double{frequencies[i]};
          const double a = row[i], b = row[i + kDim / 2];
          row[i] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
          row[i + kDim / 2] = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
        }
      }
    }
    return q;
  }

  Result<std::vector<std::vector<bool>>> select(Session& session, const Queries& q, bool positions,
                                                bool before) const {
    AttendCall call = testing::make_call(1, std::ssize(q.positions), q.after.data(), {});
    call.positions = positions ? q.positions.data() : nullptr;
    call.q_before_rope = before ? q.before.data() : nullptr;
    SQZ_ASSIGN_OR_RETURN(const auto heads, session.select(call));
    std::vector<std::vector<bool>> out;
    for (const HeadSelection& head : heads) {
      auto& slots = out.emplace_back(static_cast<size_t>(served_.index->layers[1].slots));
      for (const KeyRun& run : head.runs.first(static_cast<size_t>(head.run_count))) {
        std::fill_n(slots.begin() + run.first, run.length, true);
      }
    }
    return out;
  }

  Served served_;
  QmodelFile qmodel_;
};

TEST_F(Saap, ReadsTheBucketsThatTheNetworkOrTheCentroidsName) {
  const int64_t keys = served_.index->layers[1].slots;
  for (const SelectorKind selector : {SelectorKind::kSaap, SelectorKind::kKmeans}) {
    std::set<std::vector<bool>> seen;
    for (const double keep : {0.1, 0.3, 0.7}) {
      const auto session = testing::open_session(
          served_, testing::session_options({.selector = selector, .keep = keep}));
      ASSERT_NE(session, nullptr);
      for (const int64_t tokens : {1, 5, 9}) {
        const Queries q = queries(tokens, static_cast<uint64_t>(tokens));
        const auto slots = select(*session, q, true, true);
        ASSERT_TRUE(slots.ok()) << slots.status().message();
        const int64_t wanted = std::llround(keep * static_cast<double>(keys));
        for (int64_t head = 0; head < kHeads; ++head) {
          EXPECT_EQ((*slots)[head], expected_slots(selector, head, q.before, wanted))
              << static_cast<int>(selector) << " " << keep << " " << tokens << " " << head;
          seen.insert((*slots)[head]);
        }
      }
    }
    EXPECT_GT(seen.size(), 9u) << "queries differ in what they read";
  }
}

TEST_F(Saap, TurnsQueriesBackByPositionsAndRope) {
  const auto session = testing::open_session(
      served_, testing::session_options({.selector = SelectorKind::kSaap, .keep = 0.2}));
  ASSERT_NE(session, nullptr);
  const Queries q = queries(4, 8);
  const auto given = select(*session, q, false, true);
  const auto turned = select(*session, q, true, false);
  ASSERT_TRUE(given.ok() && turned.ok()) << turned.status().message();
  EXPECT_EQ(*given, *turned);
  const auto neither = select(*session, q, false, false);
  EXPECT_EQ(neither.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(neither.status().message(), HasSubstr("positions: found null"));

  const RopeUndo rope(qmodel_.model.rope, kDim);
  std::vector<float> angles(kDim), back(kDim);
  rope.apply(q.positions[3], q.after.data() + 3 * kHeads * kGroup * kDim, 1, angles.data(),
             back.data());
  for (int64_t i = 0; i < kDim; ++i) {
    EXPECT_NEAR(back[i], q.before[3 * kHeads * kGroup * kDim + i], 2e-3);
  }
}

TEST_F(Saap, AttendsToWhatItReadsAndTellsHowMuch) {
  const auto session = testing::open_session(
      served_, testing::session_options({.selector = SelectorKind::kSaap, .budget = 0.25}));
  ASSERT_NE(session, nullptr);
  EXPECT_NEAR(session->plan().asked_budget, 0.25, 1e-12);
  const Queries q = queries(3, 4);
  const auto slots = select(*session, q, true, false);
  ASSERT_TRUE(slots.ok());
  AttendCall call = testing::make_call(1, 3, q.after.data(), {});
  std::vector<float> out(q.after.size()), lse(3 * kHeads * kGroup);
  call.out = out.data();
  call.lse = lse.data();
  call.positions = q.positions.data();
  ASSERT_TRUE(session->attend(call).ok());
  for (int64_t row = 0; row < 3 * kHeads * kGroup; ++row) {
    const int64_t head = row % (kHeads * kGroup) / kGroup;
    reference::Selected selected;
    selected.slots = (*slots)[head];
    const auto expected = reference::attend(q.after.data() + row * kDim, served_.index->layers[1],
                                            head, served_.scale(), selected, false);
    ASSERT_NEAR(lse[row], expected.lse, 2e-5);
    for (int64_t c = 0; c < kDim; ++c) ASSERT_NEAR(out[row * kDim + c], expected.out[c], 1e-4);
  }
  EXPECT_NEAR(testing::delivered(*session, 1), 0.25, 0.06);
  // The dense layer needs no positions.
  call.layer = 0;
  call.positions = nullptr;
  EXPECT_TRUE(session->attend(call).ok());
}

TEST_F(Saap, LayersReadTheirShareOfTheKeys) {
  testing::TinyQmodelOptions o;
  o.layers = 3;
  o.head_dim = kDim;
  o.buckets = 12;
  const testing::TemporaryDirectory dir;
  ASSERT_TRUE(
      testing::write_tiny_buckets(dir.file("x.sqz"), testing::tiny_qmodel(o), kTokens).ok());
  auto file = SqzFile::open(dir.file("x.sqz"), OpenMode::kRead);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto index = make_served_index(*file);
  ASSERT_TRUE(index.ok());
  served_.index = *index;
  const std::vector<double> scales = {1, 1, 3};  // layer 0 is dense
  const auto session = testing::open_session(
      served_, testing::session_options(
                   {.selector = SelectorKind::kSaap, .keep = 0.3, .layer_scales = scales}));
  ASSERT_NE(session, nullptr);
  EXPECT_FALSE(session->selects(0));
  for (const auto& [layer, keep] : {std::pair(1, 0.15), std::pair(2, 0.45)}) {
    for (int64_t head = 0; head < kHeads; ++head) {
      EXPECT_FLOAT_EQ(session->plan().head_keep[0][static_cast<size_t>(layer * kHeads + head)],
                      static_cast<float>(keep));
    }
  }
}

TEST_F(Saap, RefusesWhatItCannotServe) {
  const double threshold = 0.1;
  const SelectionRequest bad[] = {
      {.selector = SelectorKind::kSaap},
      {.selector = SelectorKind::kSaap, .group = GroupPolicy::kMax, .keep = 0.2},
      {.selector = SelectorKind::kSaap, .thresholds = &threshold},
      {.selector = SelectorKind::kKmeans, .group = GroupPolicy::kAny, .keep = 0.2}};
  for (const auto& request : bad) {
    EXPECT_EQ(testing::refusal(served_, request).code(), Code::kInvalidArgument) << &request - bad;
  }
  const Served clusters = testing::serve({.tokens = 5000});
  EXPECT_THAT(testing::refusal(clusters, {.selector = SelectorKind::kSaap, .keep = 0.2}).message(),
              HasSubstr("partition: found kmeans, expected buckets"));
  EXPECT_EQ(testing::refusal(served_, {.keep = 0.2}).code(), Code::kUnsupported)
      << "squeezed needs centroids";

  for (const SelectorKind selector : {SelectorKind::kSaap, SelectorKind::kKmeans}) {
    const auto session = testing::open_session(
        served_, testing::session_options({.selector = selector, .keep = 0.2}));
    Queries q = queries(2, 3);
    q.before[5] = std::nanf("");
    EXPECT_EQ(select(*session, q, false, true).status().code(), Code::kNumeric);
    // Numbers whose products are none.
    std::fill(q.before.begin(), q.before.end(), 3e38f);
    EXPECT_EQ(select(*session, q, false, true).status().code(), Code::kNumeric);
  }
}

TEST(Classifier, SharesDoNotDependOnTheBatchOrTheMachine) {
  constexpr int64_t kQueries = 37, kWide = 19, kBuckets = 33, kHidden = 40;
  const QmodelFile q =
      testing::tiny_qmodel({.head_dim = kWide, .buckets = kBuckets, .hidden = kHidden});
  const QmodelLayer& layer = q.layers[1];
  const Classifier n = {.dim = kWide,
                        .hidden = kHidden,
                        .buckets = kBuckets,
                        .hidden_weight = layer.hidden_weight.data(),
                        .hidden_bias = layer.hidden_bias.data(),
                        .output_weight = layer.output_weight.data(),
                        .output_bias = layer.output_bias.data()};
  const std::vector<float> queries = testing::Random(3).normals(kQueries * kWide);
  std::vector<float> work(static_cast<size_t>(classifier_floats(kWide, kHidden, kBuckets)));
  const float* rows[kQueries];
  for (int64_t i = 0; i < kQueries; ++i) rows[i] = queries.data() + i * kWide;
  std::vector<float> first;
  for (const CpuKernels* kernels : available_cpu_kernels()) {
    SCOPED_TRACE(kernels->name);
    std::vector<float> together(kBuckets), alone(kBuckets);
    add_bucket_shares(*kernels, n, rows, kQueries, work.data(), together);
    for (const float* row : rows) add_bucket_shares(*kernels, n, &row, 1, work.data(), alone);
    EXPECT_EQ(together, alone);
    EXPECT_NEAR(std::accumulate(alone.begin(), alone.end(), 0.0), kQueries, 1e-3);
    if (first.empty()) first = alone;
    for (size_t c = 0; c < first.size(); ++c) EXPECT_NEAR(alone[c], first[c], 1e-4) << c;
  }
}

}  // namespace
}  // namespace sqz
