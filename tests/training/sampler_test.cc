#include "training/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

namespace sqz::training {
namespace {

TEST(Sampler, GreedyTakesTheFirstOfTheLargest) {
  Sampler sampler(0, 1, 0);
  EXPECT_EQ(sampler.next(std::vector<float>{1, 3, 2, 3}), 1);
}

// Frequencies of 20,000 draws against the softmax, within four standard deviations.
void expect_frequencies(double temperature, double top_p, const std::vector<double>& expected) {
  constexpr int kDraws = 20000;
  const std::vector<float> logits = {0.0f, 2.0f, 1.0f, -1.0f};
  Sampler sampler(temperature, top_p, 11);
  std::map<int32_t, int> seen;
  for (int i = 0; i < kDraws; ++i) ++seen[sampler.next(logits)];
  for (size_t i = 0; i < expected.size(); ++i) {
    const double deviation = std::sqrt(expected[i] * (1 - expected[i]) / kDraws);
    EXPECT_NEAR(seen[static_cast<int32_t>(i)] / double{kDraws}, expected[i], 4 * deviation + 1e-12);
  }
}

TEST(Sampler, FollowsTheSoftmax) {
  const double sum = std::exp(0) + std::exp(2) + std::exp(1) + std::exp(-1);
  expect_frequencies(1.0, 1.0,
                     {std::exp(0) / sum, std::exp(2) / sum, std::exp(1) / sum, std::exp(-1) / sum});
}

TEST(Sampler, TemperatureDividesTheLogits) {
  const double sum = std::exp(0) + std::exp(1) + std::exp(0.5) + std::exp(-0.5);
  expect_frequencies(
      2.0, 1.0, {std::exp(0) / sum, std::exp(1) / sum, std::exp(0.5) / sum, std::exp(-0.5) / sum});
}

// The two best hold 0.644 + 0.237 = 0.881 of the mass: 0.8 needs both and no more.
TEST(Sampler, TopPKeepsTheSmallestSetThatReachesIt) {
  const double sum = std::exp(2) + std::exp(1);
  expect_frequencies(1.0, 0.8, {0, std::exp(2) / sum, std::exp(1) / sum, 0});
  expect_frequencies(1.0, 0.6, {0, 1, 0, 0});
}

TEST(Sampler, LargeLogitsDoNotOverflow) {
  Sampler sampler(1.0, 1.0, 3);
  EXPECT_EQ(sampler.next(std::vector<float>{1e30f, -1e30f}), 0);
}

}  // namespace
}  // namespace sqz::training
