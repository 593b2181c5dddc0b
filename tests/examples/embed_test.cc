// examples/embed as a user runs it, against attention in plain double.
#include <gmock/gmock.h>

#include <cmath>
#include <cstdio>
#include <cstring>

#include "tests/common/capture_file.h"
#include "tests/common/tiny_index.h"
#include "tests/tools/run_tool.h"

namespace sqz {

// Programs alone are run here.
ToolMain tool_main(std::string_view) {
  return nullptr;
}

namespace {

using ::testing::HasSubstr;

constexpr int64_t kQueries = 3;

class Embed : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    auto written = testing::write_tiny_index(path("tiny.sqz"), options_);
    ASSERT_TRUE(written.ok()) << written.status().message();
    index_ = *std::move(written);
    std::mt19937_64 rng(7);
    std::normal_distribution<float> normal;
    for (int64_t l = 0; l < options_.layers; ++l) {
      std::vector<float>& q = queries_.emplace_back(kQueries * row());
      for (float& x : q) x = normal(rng);
    }
  }
  int64_t row() const { return options_.query_heads * options_.head_dim; }

  // [T, Hq, d] as text.
  std::string text(int64_t layer) const {
    std::string out;
    for (const float x : queries_[static_cast<size_t>(layer)]) {
      char number[32];
      std::snprintf(number, sizeof(number), "%.9g\n", x);
      out += number;
    }
    return out;
  }

  void write_capture(const std::string& name) const {
    CaptureInfo info;
    info.model = index_.metadata.model;
    info.tokens.assign(static_cast<size_t>(options_.tokens), 1);
    for (int64_t t = 0; t < kQueries; ++t) info.query_positions.push_back(options_.tokens - 3 + t);
    testing::write_capture(path(name), info, [&](int64_t l) {
      const auto& layer = index_.layers[static_cast<size_t>(l)];
      CapturedLayer data{layer.keys, layer.values, {}};
      for (int64_t h = 0; h < options_.query_heads; ++h) {
        for (int64_t t = 0; t < kQueries; ++t) {
          const auto from = queries_[static_cast<size_t>(l)].begin() +
                            (t * options_.query_heads + h) * options_.head_dim;
          data.queries.insert(data.queries.end(), from, from + options_.head_dim);
        }
      }
      return data;
    });
  }

  // Norm of the outputs and mean lse of dense attention to a layer.
  std::pair<double, double> reference(int64_t layer) const {
    const auto& stored = index_.layers[static_cast<size_t>(layer)];
    const int64_t d = options_.head_dim, group = options_.query_heads / options_.kv_heads;
    double square = 0, lse = 0;
    for (int64_t i = 0; i < kQueries * options_.query_heads; ++i) {
      const int64_t first = i % options_.query_heads / group * options_.tokens * d;
      const float* q = queries_[static_cast<size_t>(layer)].data() + i * d;
      std::vector<double> out(static_cast<size_t>(d));
      double sum = 0;
      for (int64_t t = 0; t < options_.tokens; ++t) {
        double dot = 0;
        for (int64_t c = 0; c < d; ++c) dot += double{q[c]} * stored.keys[first + t * d + c];
        const double weight = std::exp(dot * index_.metadata.model.attention_scale);
        sum += weight;
        for (int64_t c = 0; c < d; ++c) out[c] += weight * stored.values[first + t * d + c];
      }
      for (const double x : out) square += (x / sum) * (x / sum);
      lse += std::log(sum) / static_cast<double>(kQueries * options_.query_heads);
    }
    return {std::sqrt(square), lse};
  }

  testing::TinyIndexOptions options_;
  testing::TinyIndex index_;
  std::vector<std::vector<float>> queries_;  // per layer [T, Hq, d]
};

TEST_F(Embed, TheWholeBudgetIsAttentionFromACaptureAndFromNumbers) {
  write_capture("c.h5");
  const ToolRun result = run(EMBED, {path("tiny.sqz"), "--budget", "1", "--capture", path("c.h5")});
  ASSERT_EQ(result.code, 0) << result.err;
  double norm = 0, mean = 0, error = 1;
  const size_t second = result.out.find("layer 1");
  ASSERT_NE(second, std::string::npos) << result.out;
  ASSERT_EQ(
      std::sscanf(result.out.c_str() + second,
                  "layer 1: 12 queries, |out| %lf, mean lse %lf, error %lf", &norm, &mean, &error),
      3)
      << result.out;
  const auto [expected_norm, expected_lse] = reference(1);
  EXPECT_NEAR(norm, expected_norm, 1e-4 * expected_norm);
  EXPECT_NEAR(mean, expected_lse, 1e-4);
  EXPECT_EQ(error, 0);
  EXPECT_THAT(result.out, HasSubstr("budget 1 asked, 1 delivered"));
  const ToolRun numbers = run(EMBED, {path("tiny.sqz"), "--budget", "1"}, text(0));
  EXPECT_EQ(numbers.out.substr(0, numbers.out.find('\n')),
            result.out.substr(0, result.out.find('\n')));
}

TEST_F(Embed, BadInput) {
  const auto expect = [&](std::vector<std::string> more, const std::string& input,
                          const std::string& part) {
    const ToolRun result = run(EMBED, std::move(more), input);
    EXPECT_EQ(result.code, 1) << result.err;
    EXPECT_THAT(result.err, HasSubstr(part));
    EXPECT_EQ(result.out, "");
  };
  const std::string index = path("tiny.sqz");
  expect({}, "", "index");
  expect({path("none.sqz")}, text(0), "none.sqz");
  expect({index}, "", "found 0 numbers, expected a multiple of 32");
  expect({index}, "1 2 three", "found 2 numbers and then another word");
  expect({index, "--budget", "1.5"}, text(0), "budget");
  write_all(path("no.h5"), "text");
  expect({index, "--capture", path("no.h5")}, "", "no.h5: cannot be opened as HDF5");
  options_.query_heads = 2;
  ASSERT_TRUE(testing::write_tiny_index(path("other.sqz"), options_).ok());
  options_.query_heads = 4;
  write_capture("c.h5");
  expect({path("other.sqz"), "--capture", path("c.h5")}, "",
         "/layers/0/queries: expected the shape [2,");
}

}  // namespace
}  // namespace sqz
