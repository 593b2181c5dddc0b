// examples/embed as a user runs it, against attention in plain double.
#include <gmock/gmock.h>

#include <cmath>
#include <cstdio>
#include <cstring>

#include "formats/capture.h"
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
    const auto writer = CaptureWriter::create(path(name), false, info);
    ASSERT_TRUE(writer.ok()) << writer.status().message();
    for (int64_t l = 0; l < options_.layers; ++l) {
      const auto& layer = index_.layers[static_cast<size_t>(l)];
      CapturedLayer data{layer.keys, layer.values, {}, {}};
      for (int64_t h = 0; h < options_.query_heads; ++h) {
        for (int64_t t = 0; t < kQueries; ++t) {
          const auto from = queries_[static_cast<size_t>(l)].begin() +
                            (t * options_.query_heads + h) * options_.head_dim;
          data.queries.insert(data.queries.end(), from, from + options_.head_dim);
        }
      }
      ASSERT_TRUE((*writer)->write_layer(l, data).ok());
    }
    ASSERT_TRUE((*writer)->commit().ok());
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

TEST_F(Embed, DenseIsAttention) {
  const ToolRun result =
      run(EMBED, {path("tiny.sqz"), "--selector", "dense", "--layer", "1"}, text(1));
  ASSERT_EQ(result.code, 0) << result.err;
  double norm = 0, low = 0, high = 0, mean = 0;
  ASSERT_EQ(
      std::sscanf(result.out.c_str(), "layer 1: 3 queries, |out| %lf, lse %lf to %lf, mean %lf",
                  &norm, &low, &high, &mean),
      4)
      << result.out;
  const auto [expected_norm, expected_lse] = reference(1);
  EXPECT_NEAR(norm, expected_norm, 1e-4 * expected_norm);
  EXPECT_NEAR(mean, expected_lse, 1e-4);
  EXPECT_LE(low, mean);
  EXPECT_LE(mean, high);
  EXPECT_THAT(result.out, HasSubstr("budget 1.0000 asked, 1.0000 delivered"));
}

TEST_F(Embed, TextFloatsAndCaptureAreTheSameQueries) {
  write_capture("c.h5");
  const auto serve = [&](std::vector<std::string> more, const std::string& input) {
    more.insert(more.end(), {path("tiny.sqz"), "--budget", "0.6", "--compare"});
    const ToolRun result = run(EMBED, more, input);
    EXPECT_EQ(result.code, 0) << result.err;
    return result.out;
  };
  const std::string raw(reinterpret_cast<const char*>(queries_[1].data()), queries_[1].size() * 4);
  const std::string from_text = serve({"--layer", "1"}, text(1));
  EXPECT_THAT(from_text, HasSubstr(", error "));
  EXPECT_EQ(serve({"--layer", "1", "--format", "f32"}, raw), from_text);
  EXPECT_EQ(serve({"--layer", "1", "--capture", path("c.h5")}, ""), from_text);
  const std::string all = serve({"--capture", path("c.h5")}, "");
  EXPECT_THAT(all, HasSubstr("layer 0: "));
  EXPECT_THAT(all, HasSubstr(from_text.substr(0, from_text.find('\n'))));
}

TEST_F(Embed, CommandLineThenEnvironmentThenFile) {
  write_all(path("e.ini"), "budget = 0.7\nread = true\ncompare = yes\n");
  const auto serve = [&](std::vector<std::string> more, std::vector<std::string> environment) {
    more.push_back(path("tiny.sqz"));
    const ToolRun result = run(EMBED, more, text(0), std::move(environment));
    EXPECT_EQ(result.code, 0) << result.err;
    return result.out;
  };
  const std::vector<std::string> file = {"--config", path("e.ini")};
  EXPECT_THAT(serve(file, {}), HasSubstr("budget 0.7000 asked"));
  EXPECT_THAT(serve(file, {}), HasSubstr(", error "));
  EXPECT_THAT(serve(file, {"SQZ_BUDGET=0.8"}), HasSubstr("budget 0.8000 asked"));
  EXPECT_THAT(serve(file, {"SQZ_COMPARE=0"}), ::testing::Not(HasSubstr(", error ")));
  EXPECT_THAT(serve({"--config", path("e.ini"), "--budget", "0.9"}, {"SQZ_BUDGET=0.8"}),
              HasSubstr("budget 0.9000 asked"));
}

TEST_F(Embed, BadInput) {
  const auto expect = [&](std::vector<std::string> more, const std::string& input, int code,
                          const std::string& part) {
    const ToolRun result = run(EMBED, std::move(more), input);
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_THAT(result.err, HasSubstr(part));
    EXPECT_EQ(result.out, "");
  };
  const std::string index = path("tiny.sqz");
  expect({}, "", 2, "no index");
  expect({path("none.sqz")}, text(0), 3, "none.sqz");
  expect({index}, "", 2, "found 0 numbers, expected a multiple of 32: 4 heads of 8");
  expect({index}, "1 2 three", 2, "number 3: found three");
  expect({index, "--format", "f32"}, "12345", 2, "5 bytes");
  expect({index, "--format", "xml"}, "", 2, "expected text or f32");
  expect({index, "--layer", "2"}, text(0), 2, "the index has 2 layers");
  expect({index, "--budget", "1.5"}, text(0), 3, "budget");
  expect({index, "--rule", "best"}, text(0), 2, "expected budget or threshold");
  expect({index, "--config", path("none.ini")}, text(0), 2, "none.ini");
  write_all(path("e.ini"), "bugdet = 0.7\n");
  expect({index, "--config", path("e.ini")}, text(0), 2, "e.ini: unrecognised option 'bugdet'");
  expect({index, "--capture", path("e.ini")}, "", 2, "e.ini: cannot be opened as HDF5");
  options_.query_heads = 2;
  ASSERT_TRUE(testing::write_tiny_index(path("other.sqz"), options_).ok());
  options_.query_heads = 4;
  write_capture("c.h5");
  expect({path("other.sqz"), "--capture", path("c.h5")}, "", 2,
         "/layers/0/queries: expected the shape [2,");
}

}  // namespace
}  // namespace sqz
