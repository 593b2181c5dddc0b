// The attention kernels against a plain float64 softmax.
#include "training/attention.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/libruntime/reference.h"
#include "tests/training/golden.h"
#include "training/runner.h"

namespace sqz::training {
namespace {

struct Case {
  std::string name;
  int64_t tokens, query_heads, kv_heads, dim, window;
  double spread;  // deviation of the elements of q and k
};

ModelDescription describe(const Case& c) {
  ModelDescription model;
  model.query_heads = c.query_heads;
  model.kv_heads = c.kv_heads;
  model.head_dim = c.dim;
  model.attention_scale = 1.0 / std::sqrt(static_cast<double>(c.dim));
  return model;
}

struct Input {
  at::Tensor q, k, v;
};

Input random_input(const Case& c) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto tensor = [&](int64_t heads, double spread) {
    at::Tensor out = at::empty({c.tokens, heads, c.dim});
    float* data = out.data_ptr<float>();
    for (int64_t i = 0; i < out.numel(); ++i) data[i] = normal(random) * static_cast<float>(spread);
    return out;
  };
  return {tensor(c.query_heads, c.spread), tensor(c.kv_heads, c.spread), tensor(c.kv_heads, 1.0)};
}

// In float64: the state of each row [tokens * query heads], and the weights that each key gets.
struct Reference {
  std::vector<std::vector<double>> out;
  std::vector<double> lse, mass;  // mass: [kv_heads, tokens]
};
Reference expected_of(const Case& c, const Input& in) {
  Reference ref;
  ref.mass.resize(static_cast<size_t>(c.kv_heads * c.tokens));
  LayerView view;
  view.dtype = DType::kF32;
  view.head_dim = c.dim;
  for (int64_t row = 0; row < c.tokens * c.query_heads; ++row) {
    const int64_t t = row / c.query_heads;
    const int64_t kv = row % c.query_heads / (c.query_heads / c.kv_heads);
    const int64_t begin = c.window > 0 ? std::max<int64_t>(0, t + 1 - c.window) : 0;
    reference::Attention attention(in.q.data_ptr<float>() + row * c.dim, view,
                                   1 / std::sqrt(static_cast<double>(c.dim)));
    for (int64_t i = begin; i <= t; ++i) {
      attention.add(in.k.data_ptr(), in.v.data_ptr(), i * c.kv_heads + kv);
    }
    const reference::State state = attention.state();
    for (int64_t i = begin; i <= t; ++i) {
      ref.mass[static_cast<size_t>(kv * c.tokens + i)] +=
          state.weights[static_cast<size_t>(i - begin)];
    }
    ref.out.push_back(state.out);
    ref.lse.push_back(state.lse);
  }
  return ref;
}

double worst_error(const Case& c, const Reference& ref, const AttentionState& state,
                   int64_t first) {
  double worst = 0;
  const auto note = [&](double error) { worst = error <= worst ? worst : error; };
  for (int64_t r = 0; r < state.lse.numel(); ++r) {
    const auto expected = static_cast<size_t>(first * c.query_heads + r);
    note(std::abs(double{state.lse.data_ptr<float>()[r]} - ref.lse[expected]));
    for (int64_t j = 0; j < c.dim; ++j) {
      note(std::abs(double{state.out.data_ptr<float>()[r * c.dim + j]} -
                    ref.out[expected][static_cast<size_t>(j)]));
    }
  }
  return worst;
}

class Attention : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    in_ = random_input(GetParam());
    ref_ = expected_of(GetParam(), in_);
  }

  // Writes and attends in steps of `step` tokens, as a chunked pass does.
  void expect_exact(KvCache& cache, int64_t step, const char* label) {
    const Case& c = GetParam();
    for (int64_t first = 0; first < c.tokens; first += step) {
      const int64_t count = std::min(step, c.tokens - first);
      cache.resize(first + count);
      cache.write(first, in_.k.narrow(0, first, count), in_.v.narrow(0, first, count));
      const auto state = cache.attend(in_.q.narrow(0, first, count), first, c.window);
      EXPECT_LT(worst_error(c, ref_, state, first), 2e-5 * std::max(1.0, c.spread * c.spread))
          << label << " from token " << first;
    }
  }

  Input in_;
  Reference ref_;
};

TEST_P(Attention, CpuKernelsEqualFloat64) {
  for (const OfflineKernels* kernels : available_offline_kernels()) {
    for (int64_t step : {GetParam().tokens, int64_t{33}}) {
      expect_exact(*make_cpu_cache(describe(GetParam()), *kernels), step, kernels->name);
    }
  }
}

TEST_P(Attention, TorchPathEqualsFloat64) {
  for (int64_t step : {GetParam().tokens, int64_t{33}}) {
    expect_exact(*make_torch_cache(describe(GetParam())), step, "torch");
  }
}

TEST_P(Attention, MassEqualsFloat64WhateverTheThreads) {
  const Case& c = GetParam();
  const double tolerance = 1e-4 * std::max(1.0, c.spread * c.spread);
  std::vector<at::Tensor> found;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    found.push_back(attention_mass(in_.q, in_.k, describe(c), c.window));
  }
  ASSERT_EQ(found[0].sizes(), at::IntArrayRef({c.kv_heads, c.tokens}));
  for (size_t i = 0; i < ref_.mass.size(); ++i) {
    ASSERT_NEAR(found[0].data_ptr<float>()[i], ref_.mass[i], tolerance * (1 + ref_.mass[i])) << i;
  }
  EXPECT_TRUE(found[0].equal(found[1]));
  EXPECT_TRUE(found[0].equal(found[2]));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Attention,
    testing::Values(Case{"one_token", 1, 4, 2, 64, 0, 1}, Case{"short", 7, 8, 2, 64, 0, 1},
                    Case{"many_blocks", 700, 4, 2, 64, 0, 1}, Case{"dim_128", 300, 4, 1, 128, 0, 1},
                    Case{"odd_dim", 300, 3, 3, 24, 0, 1}, Case{"window", 700, 4, 2, 32, 50, 1},
                    Case{"window_of_one", 40, 2, 2, 16, 1, 1},
                    Case{"two_blocks_a_stripe", 2300, 2, 1, 16, 0, 1},
                    Case{"long_window", 700, 2, 1, 32, 400, 1},
                    Case{"group_above_a_task", 20, 100, 1, 16, 0, 1},
                    Case{"peaked", 600, 4, 2, 64, 0, 5}),
    [](const auto& test) { return test.param.name; });

// A NaN must reach the output: masked by a comparison it would silently select nothing.
TEST(AttentionNan, Propagates) {
  const Case c{"nan", 40, 2, 1, 16, 0, 1};
  Input in = random_input(c);
  in.k.data_ptr<float>()[20 * 16] = NAN;
  for (const OfflineKernels* kernels : available_offline_kernels()) {
    const auto cache = make_cpu_cache(describe(c), *kernels);
    cache->resize(c.tokens);
    cache->write(0, in.k, in.v);
    const at::Tensor out = cache->attend(in.q, 0, 0).out;
    EXPECT_FALSE(out.narrow(0, 0, 20).isnan().any().item<bool>());
    EXPECT_TRUE(out.narrow(0, 20, 20).isnan().all().item<bool>()) << kernels->name;
  }
}

// Each query of a model gives away 1, and capturing changes nothing else.
TEST(AttentionMassOfAPass, EveryQueryGivesOne) {
  const auto runner = load_runner(nano_folder());
  const ModelDescription& model = runner->config().description;
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 300; ++i) tokens.push_back(100 + i * 37 % 4000);
  int64_t layers = 0;
  std::vector<float> keys, again;  // of the last layer
  PrefillOptions options;
  options.attention = true;
  options.consumer = [&](const LayerCapture& layer) -> Status {
    ++layers;
    keys.assign(layer.keys.begin(), layer.keys.end());
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
  ASSERT_TRUE(runner->prefill(tokens, options).ok());
  EXPECT_EQ(layers, model.layers);
  options.attention = false;
  options.consumer = [&](const LayerCapture& layer) -> Status {
    EXPECT_TRUE(layer.attention.empty());
    again.assign(layer.keys.begin(), layer.keys.end());
    return {};
  };
  ASSERT_TRUE(runner->prefill(tokens, options).ok());
  EXPECT_EQ(keys, again);
}

}  // namespace
}  // namespace sqz::training
