// Masses, sizes and recall against plain loops in float64.
#include "training/qmodel_samples.h"

#include <gtest/gtest.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

#include "tests/training/golden.h"
#include "tests/training/random_tensor.h"
#include "training/qmodel_recall.h"

namespace sqz::training {
namespace {

constexpr int64_t kKeys = 40, kDim = 6, kBuckets = 5;

HeadRows some_rows() {
  HeadRows rows;
  rows.queries = random({30, kDim}, 1);
  rows.positions = at::arange(10, 40, at::kLong);
  rows.keys = random({kKeys, kDim}, 2);
  rows.scale = 0.7;
  rows.far = {.sink = 2, .recent = 8};
  return rows;
}

at::Tensor some_buckets() {
  return (at::arange(kKeys, at::kLong) * 7 % 13) % kBuckets;
}

double logit(const HeadRows& rows, int64_t row, int64_t key) {
  double sum = 0;
  for (int64_t c = 0; c < kDim; ++c) {
    sum += double{rows.queries[row][c].item<float>()} * double{rows.keys[key][c].item<float>()};
  }
  return sum * rows.scale;
}

TEST(QmodelSamples, MassesAndSizesAreThoseOfAFloat64Reference) {
  const HeadRows rows = some_rows();
  const at::Tensor buckets = some_buckets();
  const at::Tensor masses = bucket_masses(rows, buckets, kBuckets);
  const at::Tensor sizes = bucket_sizes(rows.positions, buckets, kBuckets, rows.far);
  for (int64_t r = 0; r < 30; ++r) {
    std::vector<double> mass(kBuckets), size(kBuckets);
    double total = 0;
    const int64_t position = 10 + r;
    for (int64_t key = 2; key < position - 8; ++key) {
      const auto bucket = static_cast<size_t>(buckets[key].item<int64_t>());
      mass[bucket] += std::exp(logit(rows, r, key));
      total += std::exp(logit(rows, r, key));
      size[bucket] += 1;
    }
    for (int64_t c = 0; c < kBuckets; ++c) {
      const double expected = total > 0 ? mass[static_cast<size_t>(c)] / total : 0;
      EXPECT_NEAR(masses[r][c].item<float>(), expected, 1e-5) << "row " << r << " bucket " << c;
      EXPECT_EQ(sizes[r][c].item<float>(), size[static_cast<size_t>(c)]);
    }
  }
  EXPECT_EQ(sizes[0].sum().item<float>(), 0) << "position 10 has no far key";
  EXPECT_EQ(sizes[29].sum().item<float>(), 29);
}

TEST(QmodelSamples, BestKeysAreFarOrNot) {
  const HeadRows rows = some_rows();
  const at::Tensor far = best_is_far(rows);
  int64_t count = 0;
  for (int64_t r = 0; r < 30; ++r) {
    const int64_t position = 10 + r;
    int64_t best = 2;
    for (int64_t key = 2; key <= position; ++key) {
      if (logit(rows, r, key) > logit(rows, r, best)) best = key;
    }
    EXPECT_EQ(far[r].item<bool>(), position - best > 8) << r;
    count += far[r].item<bool>();
  }
  EXPECT_GT(count, 5);
  EXPECT_LT(count, 25);
}

TEST(QmodelSamples, KeysBelongToTheNearestDirection) {
  const at::Tensor centroids = at::tensor({1.0, 0.0, 0.0, 1.0, -1.0, 0.0}).view({1, 3, 2});
  const at::Tensor keys = at::tensor({5.0, 1.0, 0.1, 0.2, -3.0, 1.0, 0.0, -1.0}).view({1, 4, 2});
  const at::Tensor buckets = nearest_buckets(keys.to(at::kFloat), centroids.to(at::kFloat));
  EXPECT_TRUE(buckets.equal(at::tensor({0, 1, 2, 0}, at::kLong).view({1, 4})));
}

TEST(QmodelSamples, RecallReadsTheBestBucketsUntilTheShareIsFull) {
  const at::Tensor masses = at::tensor({0.5, 0.1, 0.4}, at::kFloat).view({1, 1, 1, 3});
  const at::Tensor sizes = at::tensor({2.0, 6.0, 2.0}, at::kFloat).view({1, 1, 3});
  const at::Tensor scores = at::tensor({1.0, 2.0, 3.0}, at::kFloat).view({1, 1, 3});
  const auto at = [&](double selectivity) {
    return recall_at(selectivity, scores, sizes, masses).item<float>();
  };
  EXPECT_NEAR(at(0.1), 0.2, 1e-6);         // half of the best bucket
  EXPECT_NEAR(at(0.2), 0.4, 1e-6);         // all of it
  EXPECT_NEAR(at(0.5), 0.4 + 0.05, 1e-6);  // and half of the next
  EXPECT_NEAR(at(1), 1, 1e-6);
}

TEST(QmodelSamples, PoolsKeepTheLastWindowsAndDrawTheirRowsAlone) {
  const NetworkShape shape = {.heads = 2, .dim = 1, .hidden = 1, .buckets = 2};
  SamplePool pool(shape, 2, 3, at::kCPU);
  for (int64_t window = 0; window < 3; ++window) {
    TrainSamples samples;
    samples.queries = at::full({2, 3, 1}, 10 * (window + 1), at::kFloat);
    samples.queries.select(1, 2).fill_(-1);  // beyond the counts
    samples.masses = at::ones({2, 3, 2});
    samples.log_sizes = at::full({2, 3, 2}, 0.5 * static_cast<double>(window), at::kFloat);
    samples.counts = at::tensor({2, window == 1 ? 0 : 1}, at::kLong);
    pool.put(window, 0, samples);
  }
  const NetworkBatch batch = pool.draw(3, 200, 7);
  EXPECT_EQ(batch.queries.sizes(), at::IntArrayRef({2, 200, 1}));
  const at::Tensor counted = batch.weights.unsqueeze(2) > 0;
  EXPECT_EQ(batch.queries.masked_select(counted).min().item<float>(), 20) << "window 0 is gone";
  EXPECT_EQ(batch.queries.masked_select(counted).max().item<float>(), 30);
  EXPECT_TRUE(batch.log_sizes.masked_select(counted).equal(
      (batch.queries / 20 - 0.5).expand({2, 200, 2}).masked_select(counted)))
      << "each row's own";
  EXPECT_EQ(batch.weights[0].sum().item<float>(), 200);
  const float half = batch.weights[1].sum().item<float>();
  EXPECT_GT(half, 50);
  EXPECT_LT(half, 150) << "window 1 has nothing for head 1";
  EXPECT_TRUE(pool.draw(3, 200, 7).queries.equal(batch.queries));
  EXPECT_FALSE(pool.draw(3, 200, 8).queries.equal(batch.queries));
}

TEST(QmodelWindows, AreCutBehindTheFirstToken) {
  QmodelOptions options;
  options.window = 4;
  options.first_token = 9;
  const std::vector<TokenText> texts = {{"a", {9, 1, 2, 3, 4, 5}}, {"b", {7}}, {"c", {1, 2}}};
  const auto windows = cut_windows(texts, options);
  ASSERT_EQ(windows.size(), 3u);
  EXPECT_EQ(windows[0].tokens, (std::vector<int32_t>{9, 1, 2, 3}));
  EXPECT_EQ(windows[1].tokens, (std::vector<int32_t>{9, 4, 5}));
  EXPECT_EQ(windows[2].tokens, (std::vector<int32_t>{9, 1, 2}));
  EXPECT_EQ(windows[2].name, "c");
  options.first_token = -1;
  EXPECT_EQ(cut_windows(texts, options)[0].tokens, (std::vector<int32_t>{9, 1, 2, 3}));
}

// Two heads with buckets of their own; one query token, in the middle of the window.
TEST(QmodelSamples, RecallCountsTheKeysOfTheWindowAndFarOnes) {
  WindowLayer layer;
  layer.keys = layer.roped_keys = random({2, kKeys, kDim}, 5);
  layer.queries = layer.roped_queries = random({2, 1, 3, kDim}, 6);
  layer.positions = at::tensor({25}, at::kLong);
  const at::Tensor centroids = random({2, kBuckets, kDim}, 7);
  const RecallSamples samples = recall_samples(layer, centroids, 0.7, {.sink = 2, .recent = 8});
  const at::Tensor buckets = nearest_buckets(layer.keys, centroids);
  for (const auto& [sizes, end] :
       {std::pair(samples.window_sizes, kKeys), {samples.far_sizes, 17}}) {
    ASSERT_EQ(sizes.sizes(), at::IntArrayRef({2, 1, kBuckets}));
    at::Tensor expected = at::zeros({2, kBuckets});
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t key = 2; key < end; ++key) expected[head][buckets[head][key]] += 1;
    }
    EXPECT_TRUE(sizes.select(1, 0).equal(expected)) << end;
  }
}

TEST(QmodelRecall, MeansAreOfQueriesAndErrorsOfWindows) {
  RecallSum sum;
  // At 5 % exactly the bucket of one key is read.
  for (const auto& [recalled, queries, far] :
       {std::tuple(0.25f, 2, true), {0.5f, 1, false}, {1.0f, 1, false}}) {
    RecallSamples window;
    window.masses = at::tensor({recalled, 1 - recalled}).expand({1, queries, 1, 2});
    window.far = at::full({1, queries, 1}, far, at::kBool);
    window.window_sizes = at::tensor({1.0f, 19.0f}).expand({1, queries, 2});
    sum.add_window(at::tensor({2.0f, 1.0f}).expand({1, queries, 2}), window);
  }
  EXPECT_NEAR(sum.mean(false)[0].recall, (2 * 0.25 + 0.5 + 1) / 4, 1e-6);
  EXPECT_NEAR(sum.mean(true)[0].recall, 0.25, 1e-6);
  // Off by 2 (.25 - .5), 0 and .5 in sums of queries.
  EXPECT_NEAR(sum.standard_errors(false)[0], std::sqrt((0.25 + 0 + 0.25) * 3 / 2) / 4, 1e-6);
  EXPECT_EQ(sum.standard_errors(true)[0], 0) << "all from one window";
}

TEST(QmodelRecall, ScoresOrderBucketsByTheAttentionToAKey) {
  FoldedNetwork network;
  network.hidden_weight = at::zeros({1, 1, 2});
  network.hidden_bias = at::zeros({1, 1});
  network.output_weight = at::zeros({1, 3, 1});
  network.output_bias = at::tensor({1.0f, 2.0f, 4.0f}).log().view({1, 3});
  RecallSamples samples;
  samples.queries = at::tensor({1.0f, 0.0f, 1.0f, 1.0f}).view({1, 2, 2});
  samples.masses = at::zeros({1, 1, 2, 3});
  samples.far_sizes = at::tensor({6.0f, 2.0f, 0.0f}).view({1, 1, 3});
  // A bucket's share is n exp(logit) over the sum of these: .6 and .4 for both queries.
  const at::Tensor scores = classifier_scores(network, samples)[0][0];
  EXPECT_NEAR(scores[0].item<float>(), 2 * 0.6 / 6, 1e-6);
  EXPECT_NEAR(scores[1].item<float>(), 2 * 0.4 / 2, 1e-6);
  EXPECT_EQ(scores[2].item<float>(), 0) << "a bucket without keys";
  const at::Tensor centroids = at::tensor({1.0f, 0.0f, 0.0f, 1.0f, 3.0f, 0.0f}).view({1, 3, 2});
  EXPECT_TRUE(centroid_scores(centroids, samples)[0][0].equal(at::tensor({2.0f, 1.0f, 6.0f})));
}

class QmodelCapture : public ::testing::Test {
 protected:
  void SetUp() override {
    runner_ = load_runner(nano_folder());
    for (int32_t i = 0; i < 300; ++i) window_.tokens.push_back(100 + i * i % 3001);
  }
  std::unique_ptr<Runner> runner_;
  TokenText window_;
};

// Keys and queries after RoPE are made again from those before: they must be the model's own.
TEST_F(QmodelCapture, RopedVectorsAreTheModels) {
  const c10::InferenceMode inference;
  WindowPass pass;
  pass.positions = {50, 120, 299};
  pass.layers = {2};
  std::vector<float> keys, queries;
  PrefillOptions plain;
  plain.query_positions = pass.positions;
  plain.consumer = [&](const LayerCapture& capture) {
    if (capture.layer == 2) keys.assign(capture.keys.begin(), capture.keys.end());
    if (capture.layer == 2) queries.assign(capture.queries.begin(), capture.queries.end());
    return Status();
  };
  ASSERT_TRUE(runner_->prefill(window_.tokens, plain).ok());
  int calls = 0;
  const Status status = run_window(*runner_, window_, pass, [&](int64_t i, const WindowLayer& l) {
    EXPECT_EQ(i, 0);
    ++calls;
    EXPECT_EQ(l.roped_keys.sizes(), at::IntArrayRef({2, 300, 64}));
    const at::Tensor want = at::from_blob(keys.data(), {2, 300, 64}, at::kFloat);
    EXPECT_LT((l.roped_keys - want).abs().max().item<float>(), 1e-4);
    EXPECT_GT((l.keys - want).abs().max().item<float>(), 0.1) << "those before RoPE are others";
    const at::Tensor q = at::from_blob(queries.data(), {2, 2, 3, 64}, at::kFloat);
    EXPECT_LT((l.roped_queries - q.transpose(1, 2)).abs().max().item<float>(), 1e-4);
    return Status();
  });
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(calls, 1);
}

TEST_F(QmodelCapture, TrainingSeesFarAndNearQueriesAsAsked) {
  const c10::InferenceMode inference;
  WindowPass pass;
  pass.positions = draw_positions(41, 300, 100, 5);
  ASSERT_EQ(pass.positions.size(), 100u);
  pass.layers = {3};
  const FarKeys far = {.sink = 1, .recent = 40};
  const Status status = run_window(*runner_, window_, pass, [&](int64_t, const WindowLayer& l) {
    at::Tensor centroids = random({2, kBuckets, 64}, 3);
    centroids.div_(centroids.norm(2, 2, true));
    const at::Tensor buckets = nearest_buckets(l.keys, centroids);
    for (const double near : {0.0, 0.4, 1.0}) {
      const SampleChoice choice = {.most = 30, .near = near, .seed = 9};
      const TrainSamples samples = train_samples(l, centroids, 0.125, far, choice);
      for (int64_t head = 0; head < 2; ++head) {
        const int64_t count = samples.counts[head].item<int64_t>();
        EXPECT_LE(count, 30);
        HeadRows row;
        row.keys = l.roped_keys[head];
        row.scale = 0.125;
        row.far = far;
        int64_t near_rows = 0;
        for (int64_t i = 0; i < count; ++i) {  // where in the window the sample comes from
          const at::Tensor same = (l.queries[head] == samples.queries[head][i]).all(2).nonzero();
          EXPECT_EQ(same.size(0), 1);
          const int64_t token = same[0][0].item<int64_t>(), member = same[0][1].item<int64_t>();
          row.queries = l.roped_queries[head][token][member].unsqueeze(0);
          row.positions = l.positions.narrow(0, token, 1);
          near_rows += !best_is_far(row).item<bool>();
          const at::Tensor masses = bucket_masses(row, buckets[head], kBuckets)[0];
          EXPECT_LT((masses - samples.masses[head][i]).abs().max().item<float>(), 1e-5);
          EXPECT_NEAR(masses.sum().item<float>(), 1, 1e-5);
          const at::Tensor sizes = bucket_sizes(row.positions, buckets[head], kBuckets, far)[0];
          EXPECT_LT((sizes - samples.log_sizes[head][i].exp()).abs().max().item<float>(), 1e-3);
        }
        EXPECT_EQ(near_rows, static_cast<int64_t>(30 * near)) << "there are enough of these";
        EXPECT_EQ(count > near_rows, near < 1);
      }
    }
    return Status();
  });
  EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace
}  // namespace sqz::training
