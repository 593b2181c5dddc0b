// The batched network: its loss by hand, folding, and that it learns.
#include <gtest/gtest.h>

#include "training/qmodel_network.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <cmath>

#include "tests/training/random_tensor.h"

namespace sqz::training {
namespace {

NetworkBatch some_batch() {
  NetworkBatch batch;
  batch.queries = random({2, 7, 3}, 21);
  batch.masses = random({2, 7, 4}, 22).softmax(2);
  batch.masses.select(1, 2).zero_().select(1, 1).fill_(1);  // 0 log 0
  at::Tensor sizes = at::arange(1, 57, at::kFloat).view({2, 7, 4});
  sizes.select(1, 2).select(1, 3).zero_();  // a bucket without keys
  batch.log_sizes = log_sizes(sizes);
  batch.weights = at::ones({2, 7});
  batch.weights.select(1, 4).zero_();
  return batch;
}

TEST(QmodelNetwork, LossIsTheDivergenceOfTheRowsThatCount) {
  NetworkBatch batch = some_batch();
  const at::Tensor logits = random({2, 7, 4}, 9);
  const auto loss = [&](int64_t head) { return divergence(logits, batch)[head].item<double>(); };
  const double before = loss(0);
  EXPECT_TRUE(std::isfinite(before));
  batch.masses.select(1, 4).fill_(0.25);  // the row without weight
  EXPECT_EQ(loss(0), before);
  batch.masses.select(1, 5).fill_(0.25);
  EXPECT_NE(loss(0), before);

  // exp(logit) times the keys of a bucket is its share, but for a constant.
  const at::Tensor right = at::tensor({1.0, 2.0, 1.0, 2.0}).log().expand({2, 7, 4});
  batch.log_sizes = log_sizes(at::tensor({1.0, 1.0, 3.0, 2.0}).expand({2, 7, 4}));
  batch.masses = at::tensor({0.1, 0.2, 0.3, 0.4}).expand({2, 7, 4}).contiguous();
  EXPECT_NEAR(divergence(right, batch).sum().item<double>(), 0, 1e-6);
  batch.masses.fill_(0.25);
  const double by_hand = 0.25 * (std::log(0.25 / 0.1) + std::log(0.25 / 0.2) +
                                 std::log(0.25 / 0.3) + std::log(0.25 / 0.4));
  EXPECT_NEAR(divergence(right, batch)[1].item<double>(), by_hand, 1e-6);
}

// After the first step the running statistics are those of its batch, and with a rate of 0 the
// weights are the first ones.
TEST(QmodelNetwork, FoldedItHasTheLossOfTraining) {
  Network network({.heads = 2, .dim = 3, .hidden = 5, .buckets = 4}, 5, at::kCPU);
  const NetworkBatch batch = some_batch();
  const at::Tensor loss = network.train(batch, 0);
  const at::Tensor folded = divergence(bucket_logits(network.fold(), batch.queries), batch);
  EXPECT_LT((folded - loss).abs().max().item<float>(), 1e-5);
  EXPECT_GT((loss[0] - loss[1]).abs().item<float>(), 1e-3);
}

TEST(QmodelNetwork, LearnsWhichBucketAQueryNeeds) {
  Network network({.heads = 2, .dim = 3, .hidden = 16, .buckets = 4}, 5, at::kCPU);
  NetworkBatch batch;
  batch.queries = random({2, 200, 3}, 41);
  // The bucket is the quadrant of the first two numbers; each head has its own names for them.
  const at::Tensor quadrant = (batch.queries.select(2, 0) > 0).to(at::kLong) * 2 +
                              (batch.queries.select(2, 1) > 0).to(at::kLong);
  batch.masses = at::zeros({2, 200, 4});
  batch.log_sizes = at::zeros({2, 200, 4});
  for (int64_t head = 0; head < 2; ++head) {
    batch.masses.select(0, head).scatter_(1, ((quadrant[head] + head) % 4).unsqueeze(1), 1.0);
  }
  batch.weights = at::ones({2, 200});
  double first = 0, last = 0;
  for (int i = 0; i < 300; ++i) {
    last = network.train(batch, 0.01).mean().item<double>();
    if (i == 0) first = last;
  }
  EXPECT_LT(last, 0.1 * first);
  EXPECT_EQ(network.steps(), 300);
  const at::Tensor chosen = bucket_logits(network.fold(), batch.queries).argmax(2);
  const at::Tensor right = (chosen == batch.masses.argmax(2)).to(at::kFloat).mean();
  EXPECT_GT(right.item<float>(), 0.95);
}

TEST(QmodelNetwork, AGpuLearnsToNameTheSameBuckets) {
  if (!at::hasCUDA()) GTEST_SKIP() << "LibTorch sees no GPU";
  const auto learned = [&](at::Device device) {
    const auto normals = [&](at::IntArrayRef sizes, uint64_t seed) {
      return random(sizes, seed).to(device);
    };
    Network network({.heads = 3, .dim = 16, .hidden = 64, .buckets = 32}, 5, device);
    for (uint64_t step = 0; step < 40; ++step) {
      network.train(
          {normals({3, 128, 16}, 100 + step), normals({3, 128, 32}, 200 + step).softmax(2),
           normals({3, 128, 32}, 300 + step), at::ones({3, 128}, at::device(device))},
          1e-3);
    }
    return bucket_logits(network.fold(), normals({3, 200, 16}, 7)).cpu();
  };
  const auto best = [](const at::Tensor& logits) {
    return std::get<0>(std::get<1>(logits.topk(4, 2)).sort(2));
  };
  const at::Tensor here = learned(at::kCPU), there = learned(at::kCUDA);
  EXPECT_LT((here - there).abs().max().item<float>(), 1e-2);
  const at::Tensor same = (best(here) == best(there)).all(2);
  EXPECT_GE(same.sum().item<int64_t>(), 594) << "of 600 queries";
}

}  // namespace
}  // namespace sqz::training
