// The batched network: gradients against differences, batch norm folded and not, Adam by hand.
#include <gtest/gtest.h>

#include "training/qmodel_network.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <cmath>

namespace sqz::training {
namespace {

constexpr NetworkShape kShape = {.heads = 2, .dim = 3, .hidden = 5, .buckets = 4};

at::Tensor random(at::IntArrayRef shape, uint64_t seed) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::kDouble);
}

// In float64, so that differences say something.
Network wide_network() {
  Network n = make_network(kShape, 3, at::kCPU);
  n.parameters.hidden_weight = n.parameters.hidden_weight.to(at::kDouble);
  n.parameters.scale = random({2, 5}, 11).abs() + 0.5;
  n.parameters.shift = random({2, 5}, 12);
  n.parameters.output_weight = n.parameters.output_weight.to(at::kDouble);
  n.parameters.output_bias = random({2, 4}, 13);
  n.mean = random({2, 5}, 14);
  n.variance = random({2, 5}, 15).abs() + 0.1;
  return n;
}

NetworkBatch wide_batch() {
  NetworkBatch batch;
  batch.queries = random({2, 7, 3}, 21);
  batch.masses = random({2, 7, 4}, 22).softmax(2);
  batch.masses.select(1, 2).zero_().select(1, 1).fill_(1);  // 0 log 0
  at::Tensor sizes = at::arange(1, 57, at::kDouble).view({2, 7, 4});
  sizes.select(1, 2).select(1, 3).zero_();  // a bucket without keys
  batch.log_sizes = log_sizes(sizes);
  batch.weights = at::ones({2, 7}, at::kDouble);
  batch.weights.select(1, 4).zero_();
  return batch;
}

TEST(QmodelNetwork, GradientsAreThoseOfDifferences) {
  const c10::InferenceMode inference;
  Network n = wide_network();
  const NetworkBatch batch = wide_batch();
  const NetworkGradient found = gradient(n.parameters, batch);
  constexpr double kStep = 1e-6;
  for (auto member :
       {&NetworkTensors::hidden_weight, &NetworkTensors::scale, &NetworkTensors::shift,
        &NetworkTensors::output_weight, &NetworkTensors::output_bias}) {
    at::Tensor& x = n.parameters.*member;
    x = x.contiguous();
    const at::Tensor slope = (found.of.*member).contiguous();
    ASSERT_EQ(slope.sizes(), x.sizes());
    double largest = 0;
    for (int64_t i = 0; i < x.numel(); ++i) {
      double& value = x.data_ptr<double>()[i];
      const double before = value;
      value = before + kStep;
      const double above = gradient(n.parameters, batch).loss.sum().item<double>();
      value = before - kStep;
      const double below = gradient(n.parameters, batch).loss.sum().item<double>();
      value = before;
      EXPECT_NEAR(slope.data_ptr<double>()[i], (above - below) / (2 * kStep), 1e-8);
      largest = std::max(largest, std::abs(slope.data_ptr<double>()[i]));
    }
    EXPECT_GT(largest, 1e-3) << "a gradient to speak of";
  }
}

TEST(QmodelNetwork, LossIsTheDivergenceOfTheRowsThatCount) {
  const c10::InferenceMode inference;
  Network n = wide_network();
  NetworkBatch batch = wide_batch();
  const double loss = gradient(n.parameters, batch).loss[0].item<double>();
  batch.masses.select(1, 4).fill_(0.25);  // the row without weight
  EXPECT_EQ(gradient(n.parameters, batch).loss[0].item<double>(), loss);
  batch.masses.select(1, 5).fill_(0.25);
  EXPECT_NE(gradient(n.parameters, batch).loss[0].item<double>(), loss);

  // With logits that give the masses themselves there is nothing to lose.
  // That is the attention to a key times the keys, but for a constant.
  n.parameters.output_weight.zero_();
  n.parameters.output_bias = at::tensor({1.0, 2.0, 1.0, 2.0}, at::kDouble).log().expand({2, 4});
  batch.log_sizes = log_sizes(at::tensor({1.0, 1.0, 3.0, 2.0}, at::kDouble).expand({2, 7, 4}));
  batch.masses = at::tensor({0.1, 0.2, 0.3, 0.4}, at::kDouble).expand({2, 7, 4}).contiguous();
  EXPECT_NEAR(gradient(n.parameters, batch).loss.sum().item<double>(), 0, 1e-12);
  batch.masses.fill_(0.25);
  const double by_hand = 0.25 * (std::log(0.25 / 0.1) + std::log(0.25 / 0.2) +
                                 std::log(0.25 / 0.3) + std::log(0.25 / 0.4));
  EXPECT_NEAR(gradient(n.parameters, batch).loss[1].item<double>(), by_hand, 1e-12);
}

TEST(QmodelNetwork, FoldedBatchNormEqualsUnfolded) {
  const c10::InferenceMode inference;
  const Network n = wide_network();
  const at::Tensor queries = random({2, 50, 3}, 31);
  const at::Tensor folded = bucket_logits(fold(n), queries);
  EXPECT_LT((folded - bucket_logits(n, queries)).abs().max().item<double>(), 1e-12);
  EXPECT_GT(folded.std().item<double>(), 0.1);
}

TEST(QmodelNetwork, RunningStatisticsFollowTheBatches) {
  const c10::InferenceMode inference;
  Network n = make_network(kShape, 5, at::kCPU);
  NetworkBatch batch = wide_batch();
  batch.queries = batch.queries.to(at::kFloat);
  batch.masses = batch.masses.to(at::kFloat);
  batch.log_sizes = batch.log_sizes.to(at::kFloat);
  batch.weights = batch.weights.to(at::kFloat);
  const NetworkGradient g = gradient(n.parameters, batch);
  const at::Tensor raw = at::bmm(batch.queries, n.parameters.hidden_weight.transpose(1, 2));
  update(n, g, 0);
  EXPECT_LT((n.mean - raw.mean(1)).abs().max().item<float>(), 1e-6);
  EXPECT_LT((n.variance - raw.var(1, false)).abs().max().item<float>(), 1e-6);
}

// Adam's first step moves every weight by the rate, against the sign of its gradient; with the same
// gradient again it does so once more.
TEST(QmodelNetwork, AdamMovesByTheRate) {
  const c10::InferenceMode inference;
  Network n = make_network(kShape, 5, at::kCPU);
  const at::Tensor before = n.parameters.output_bias.clone();
  NetworkGradient g;
  g.of = {at::zeros_like(n.parameters.hidden_weight), at::zeros_like(n.parameters.scale),
          at::zeros_like(n.parameters.shift), at::zeros_like(n.parameters.output_weight),
          at::full_like(before, -0.3)};
  g.of.output_bias[1] = 20;
  g.mean = n.mean;
  g.variance = n.variance;
  update(n, g, 0.01);
  update(n, g, 0.01);
  const at::Tensor moved = n.parameters.output_bias - before;
  EXPECT_LT((moved[0] - 0.02).abs().max().item<float>(), 1e-6);
  EXPECT_LT((moved[1] + 0.02).abs().max().item<float>(), 1e-6);
  EXPECT_EQ(n.step, 2);
}

TEST(QmodelNetwork, LearnsWhichBucketAQueryNeeds) {
  const c10::InferenceMode inference;
  Network n = make_network({.heads = 2, .dim = 3, .hidden = 16, .buckets = 4}, 5, at::kCPU);
  NetworkBatch batch;
  batch.queries = random({2, 200, 3}, 41).to(at::kFloat);
  // The bucket is the octant of the first two numbers; each head has its own names for them.
  const at::Tensor octant = (batch.queries.select(2, 0) > 0).to(at::kLong) * 2 +
                            (batch.queries.select(2, 1) > 0).to(at::kLong);
  batch.masses = at::zeros({2, 200, 4});
  batch.log_sizes = at::zeros({2, 200, 4});
  for (int64_t head = 0; head < 2; ++head) {
    batch.masses.select(0, head).scatter_(1, ((octant[head] + head) % 4).unsqueeze(1), 1.0);
  }
  batch.weights = at::ones({2, 200});
  const double first = gradient(n.parameters, batch).loss.mean().item<double>();
  for (int i = 0; i < 300; ++i) update(n, gradient(n.parameters, batch), 0.01);
  EXPECT_LT(gradient(n.parameters, batch).loss.mean().item<double>(), 0.1 * first);
  const at::Tensor chosen = bucket_logits(fold(n), batch.queries).argmax(2);
  const at::Tensor right = (chosen == batch.masses.argmax(2)).to(at::kFloat).mean();
  EXPECT_GT(right.item<float>(), 0.95);
}

TEST(QmodelNetwork, AGpuLearnsToNameTheSameBuckets) {
  if (!at::hasCUDA()) GTEST_SKIP() << "LibTorch sees no GPU";
  const c10::InferenceMode inference;
  const NetworkShape shape = {.heads = 3, .dim = 16, .hidden = 64, .buckets = 32};
  const auto learned = [&](at::Device device) {
    const auto normals = [&](at::IntArrayRef sizes, uint64_t seed) {
      return random(sizes, seed).to(at::kFloat).to(device);
    };
    Network n = make_network(shape, 5, device);
    for (uint64_t step = 0; step < 40; ++step) {
      const NetworkBatch batch = {
          normals({3, 128, 16}, 100 + step), normals({3, 128, 32}, 200 + step).softmax(2),
          normals({3, 128, 32}, 300 + step), at::ones({3, 128}, at::device(device))};
      update(n, gradient(n.parameters, batch), 1e-3);
    }
    return bucket_logits(fold(n), normals({3, 200, 16}, 7)).cpu();
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
