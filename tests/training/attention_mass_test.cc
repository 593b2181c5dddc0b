// The attention that tokens get, against a plain float64 softmax.
#include "training/attention_mass.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/training/golden.h"
#include "training/runner.h"

namespace sqz::training {
namespace {

struct Case {
  const char* name;
  int64_t tokens, query_heads, kv_heads, dim, window;
};

at::Tensor random_tensor(std::vector<int64_t> shape, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  at::Tensor out = at::empty(shape);
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] = normal(random);
  return out;
}

ModelDescription describe(const Case& c) {
  ModelDescription model;
  model.query_heads = c.query_heads;
  model.kv_heads = c.kv_heads;
  model.head_dim = c.dim;
  model.attention_scale = 1.0 / std::sqrt(static_cast<double>(c.dim));
  return model;
}

std::vector<double> reference(const Case& c, const at::Tensor& q, const at::Tensor& k) {
  std::vector<double> mass(static_cast<size_t>(c.kv_heads * c.tokens));
  const int64_t group = c.query_heads / c.kv_heads;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t head = 0; head < c.query_heads; ++head) {
      std::vector<double> weights;
      double sum = 0;
      const int64_t begin = c.window > 0 ? std::max<int64_t>(0, t + 1 - c.window) : 0;
      for (int64_t i = begin; i <= t; ++i) {
        double dot = 0;
        for (int64_t j = 0; j < c.dim; ++j) {
          dot += double{q.data_ptr<float>()[(t * c.query_heads + head) * c.dim + j]} *
                 double{k.data_ptr<float>()[(i * c.kv_heads + head / group) * c.dim + j]};
        }
        weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(c.dim))));
        sum += weights.back();
      }
      for (int64_t i = begin; i <= t; ++i) {
        mass[static_cast<size_t>(head / group * c.tokens + i)] +=
            weights[static_cast<size_t>(i - begin)] / sum;
      }
    }
  }
  return mass;
}

class AttentionMass : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionMass, EqualsFloat64WhateverTheThreads) {
  const Case& c = GetParam();
  const at::Tensor q = random_tensor({c.tokens, c.query_heads, c.dim}, 1);
  const at::Tensor k = random_tensor({c.tokens, c.kv_heads, c.dim}, 2);
  const std::vector<double> expected = reference(c, q, k);
  std::vector<at::Tensor> found;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    found.push_back(attention_mass(q, k, describe(c), c.window));
  }
  ASSERT_EQ(found[0].sizes(), at::IntArrayRef({c.kv_heads, c.tokens}));
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(found[0].data_ptr<float>()[i], expected[i], 1e-4 * (1 + expected[i])) << i;
  }
  EXPECT_TRUE(found[0].equal(found[1]));
  EXPECT_TRUE(found[0].equal(found[2]));
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionMass,
                         ::testing::Values(Case{"one_token", 1, 4, 2, 16, 0},
                                           Case{"many_blocks", 700, 4, 2, 16, 0},
                                           Case{"two_blocks_a_stripe", 2300, 2, 1, 16, 0},
                                           Case{"no_groups", 300, 3, 3, 24, 0},
                                           Case{"window", 700, 4, 1, 16, 50},
                                           Case{"window_of_one", 40, 2, 2, 16, 1}),
                         [](const auto& test) { return test.param.name; });

// Of a real model: every query gives away 1, and capturing changes nothing else.
TEST(AttentionMassOfAPass, EveryQueryGivesOne) {
  const auto runner = load_runner(nano_folder());
  ASSERT_NE(runner, nullptr);
  const ModelDescription& model = runner->config().description;
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 300; ++i) tokens.push_back(100 + i * 37 % 4000);
  int64_t layers = 0;
  std::vector<float> keys;
  PrefillOptions options;
  options.logit_positions = {299};
  options.attention = true;
  options.consumer = [&](const LayerCapture& layer) -> Status {
    ++layers;
    EXPECT_EQ(std::ssize(layer.attention), model.kv_heads * 300);
    for (int64_t h = 0; h < model.kv_heads; ++h) {
      double sum = 0;
      for (int64_t t = 0; t < 300; ++t) {
        sum += double{layer.attention[static_cast<size_t>(h * 300 + t)]};
      }
      EXPECT_NEAR(sum, 300.0 * static_cast<double>(model.group_size()), 1e-2);
    }
    return {};
  };
  const auto with = runner->prefill(tokens, options);
  ASSERT_TRUE(with.ok()) << with.status().message();
  EXPECT_EQ(layers, model.layers);
  options.attention = false;
  options.consumer = [&](const LayerCapture& layer) -> Status {
    EXPECT_TRUE(layer.attention.empty());
    return {};
  };
  const auto without = runner->prefill(tokens, options);
  EXPECT_EQ(*with, *without);
}

}  // namespace
}  // namespace sqz::training
