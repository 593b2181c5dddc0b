// The attention kernels against a plain float64 softmax.
#include "training/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

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

// One row, in float64.
struct Row {
  std::vector<double> out;
  double lse;
};
Row reference(const Case& c, const Input& in, int64_t t, int64_t head) {
  const int64_t kv = head / (c.query_heads / c.kv_heads);
  const int64_t begin = c.window > 0 ? std::max<int64_t>(0, t + 1 - c.window) : 0;
  const float* q = in.q.data_ptr<float>() + (t * c.query_heads + head) * c.dim;
  const auto row = [&](const at::Tensor& x, int64_t i) {
    return x.data_ptr<float>() + (i * c.kv_heads + kv) * c.dim;
  };
  std::vector<double> logits;
  double top = -INFINITY;
  for (int64_t i = begin; i <= t; ++i) {
    double dot = 0;
    for (int64_t j = 0; j < c.dim; ++j) dot += double{q[j]} * double{row(in.k, i)[j]};
    logits.push_back(dot / std::sqrt(static_cast<double>(c.dim)));
    top = std::max(top, logits.back());
  }
  Row out{std::vector<double>(static_cast<size_t>(c.dim)), 0};
  double sum = 0;
  for (int64_t i = begin; i <= t; ++i) {
    const double weight = std::exp(logits[static_cast<size_t>(i - begin)] - top);
    sum += weight;
    for (int64_t j = 0; j < c.dim; ++j) {
      out.out[static_cast<size_t>(j)] += weight * double{row(in.v, i)[j]};
    }
  }
  for (double& x : out.out) x /= sum;
  out.lse = top + std::log(sum);
  return out;
}

// [tokens * query heads]
std::vector<Row> reference(const Case& c, const Input& in) {
  std::vector<Row> rows;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t h = 0; h < c.query_heads; ++h) rows.push_back(reference(c, in, t, h));
  }
  return rows;
}

double worst_error(const Case& c, const std::vector<Row>& rows, const AttentionState& state,
                   int64_t first) {
  double worst = 0;
  const auto note = [&](double error) { worst = error <= worst ? worst : error; };
  for (int64_t r = 0; r < state.lse.numel(); ++r) {
    const Row& expected = rows[static_cast<size_t>(first * c.query_heads + r)];
    note(std::abs(double{state.lse.data_ptr<float>()[r]} - expected.lse));
    for (int64_t j = 0; j < c.dim; ++j) {
      note(std::abs(double{state.out.data_ptr<float>()[r * c.dim + j]} -
                    expected.out[static_cast<size_t>(j)]));
    }
  }
  return worst;
}

class Attention : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    in_ = random_input(GetParam());
    rows_ = reference(GetParam(), in_);
  }

  // Writes and attends in steps of `step` tokens, as a chunked pass does.
  void expect_exact(KvCache& cache, int64_t step, const char* label) {
    const Case& c = GetParam();
    for (int64_t first = 0; first < c.tokens; first += step) {
      const int64_t count = std::min(step, c.tokens - first);
      cache.resize(first + count);
      cache.write(first, in_.k.narrow(0, first, count), in_.v.narrow(0, first, count));
      const auto state = cache.attend(in_.q.narrow(0, first, count), first, c.window);
      EXPECT_LT(worst_error(c, rows_, state, first), 2e-5 * std::max(1.0, c.spread * c.spread))
          << label << " from token " << first;
    }
  }

  Input in_;
  std::vector<Row> rows_;
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

INSTANTIATE_TEST_SUITE_P(
    Shapes, Attention,
    testing::Values(Case{"one_token", 1, 4, 2, 64, 0, 1}, Case{"short", 7, 8, 2, 64, 0, 1},
                    Case{"many_blocks", 700, 4, 2, 64, 0, 1}, Case{"dim_128", 300, 4, 1, 128, 0, 1},
                    Case{"odd_dim", 300, 3, 3, 24, 0, 1}, Case{"window", 700, 4, 2, 32, 50, 1},
                    Case{"window_of_one", 40, 2, 2, 16, 1, 1},
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

// Two halves of the keys, merged, are all of the keys.
TEST(MergeStates, HalvesMakeAWhole) {
  const Case c{"merge", 100, 4, 2, 32, 0, 2};
  const Input in = random_input(c);
  const auto cache = make_torch_cache(describe(c));
  cache->resize(c.tokens);
  cache->write(0, in.k, in.v);
  const at::Tensor last = in.q.narrow(0, 99, 1);
  const AttentionState whole = cache->attend(last, 99, 0);
  AttentionState recent = cache->attend(last, 99, 30);
  const auto older = make_torch_cache(describe(c));
  older->resize(70);
  older->write(0, in.k.narrow(0, 0, 70), in.v.narrow(0, 0, 70));
  merge_states(recent, older->attend(last, 69, 0));
  EXPECT_LT((recent.out - whole.out).abs().max().item<float>(), 1e-5f);
  EXPECT_LT((recent.lse - whole.lse).abs().max().item<float>(), 1e-5f);

  AttentionState nothing{at::zeros_like(last), at::full({1, 4}, -INFINITY)};
  merge_states(recent, nothing);
  EXPECT_LT((recent.out - whole.out).abs().max().item<float>(), 1e-5f);
}

}  // namespace
}  // namespace sqz::training
