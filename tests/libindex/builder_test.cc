// Whole builds: what is in the file, and what happens to bad input and failing disks.
#include "libindex/builder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "tests/common/check_index.h"
#include "tests/common/tiny_model.h"
#include "tests/formats/fault_env.h"
#include "tests/libindex/clustered_data.h"

namespace sqz {
namespace {

constexpr int64_t kTokens = 700, kDim = 16, kHeads = 2, kQueryHeads = 4, kLayers = 3;

ModelDescription make_model() {
  return testing::tiny_model(kLayers, kQueryHeads, kHeads, kDim);
}

BuildOptions make_options() {
  BuildOptions options;
  options.sink = 4;
  options.tail = 20;
  options.threads = 2;
  options.engine = "faiss";  // also where there is a GPU
  return options;
}

struct Layer {
  std::vector<float> keys, values, queries;
  LayerInput input() const { return {keys, values, queries}; }
};

Layer make_layer(uint64_t seed, int64_t queries = 20) {
  Layer layer;
  for (uint64_t h = 0; h < kHeads; ++h) {
    const auto keys = test::clustered_points(kTokens, kDim, 30, 0.5f, 100 * seed + h);
    layer.keys.insert(layer.keys.end(), keys.begin(), keys.end());
  }
  layer.values = test::clustered_points(kHeads * kTokens, kDim, 30, 0.5f, 100 * seed + 50);
  layer.queries = test::clustered_points(kQueryHeads * queries, kDim, 5, 1.0f, 100 * seed + 51);
  return layer;
}

std::vector<int32_t> make_tokens(int64_t count = kTokens) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) tokens[i] = static_cast<int32_t>(i * 7 % 1000);
  return tokens;
}

class BuilderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              concat("sqz_builder_", getpid(), "_",
                     ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name = "a.sqz") const { return folder_ / name; }

  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  Result<BuildReport> build(const std::string& to, const ModelDescription& model,
                            const BuildOptions& options, Env& env = Env::posix()) {
    SQZ_ASSIGN_OR_RETURN(auto builder, IndexBuilder::create(env, to, false, model, make_tokens(),
                                                            "00000000000000ab", options));
    for (int64_t l = 0; l < kLayers; ++l) {
      const Layer layer = make_layer(static_cast<uint64_t>(l));
      SQZ_RETURN_IF_ERROR(builder->add_layer(l, layer.input()));
    }
    return builder->finish();
  }

  // The Status of adding `layer` as the first of a build.
  Status add_first(const Layer& layer, const BuildOptions& options = make_options()) {
    auto builder =
        IndexBuilder::create(Env::posix(), path(), false, make_model(), make_tokens(), "", options);
    EXPECT_TRUE(builder.ok()) << builder.status().message();
    return builder.value()->add_layer(0, layer.input());
  }

  std::filesystem::path folder_;
};

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

float element(const void* data, DType dtype, int64_t index) {
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(data) + 2 * index, 2);
  return dtype == DType::kF16 ? to_float(Float16{bits}) : to_float(BFloat16{bits});
}

float rounded(float x, DType dtype) {
  return dtype == DType::kF16 ? to_float(to_float16(x)) : to_float(to_bfloat16(x));
}

// Every tensor of a sparse layer against the input.
void check_sparse_layer(const LayerView& view, const Layer& layer, const BuildOptions& options) {
  ASSERT_EQ(view.slots, kTokens - options.sink - options.tail);
  ASSERT_EQ(view.exact, options.sink + options.tail);
  for (int64_t h = 0; h < kHeads; ++h) {
    const float* keys = layer.keys.data() + h * kTokens * kDim;
    const float* values = layer.values.data() + h * kTokens * kDim;
    const uint32_t* positions = view.positions + h * view.slots;
    std::vector<uint32_t> sorted(positions, positions + view.slots);
    std::sort(sorted.begin(), sorted.end());
    for (int64_t s = 0; s < view.slots; ++s) {
      ASSERT_EQ(sorted[s], static_cast<uint32_t>(options.sink + s));
      for (int64_t c = 0; c < kDim; ++c) {
        const int64_t at = (h * view.slots + s) * kDim + c, from = positions[s] * kDim + c;
        ASSERT_EQ(element(view.keys, view.dtype, at), rounded(keys[from], view.dtype));
        ASSERT_EQ(element(view.values, view.dtype, at), rounded(values[from], view.dtype));
      }
    }
    for (int64_t e = 0; e < view.exact; ++e) {
      const int64_t token = e < options.sink ? e : kTokens - view.exact + e;
      for (int64_t c = 0; c < kDim; ++c) {
        const int64_t at = (h * view.exact + e) * kDim + c, from = token * kDim + c;
        ASSERT_EQ(element(view.exact_keys, view.dtype, at), rounded(keys[from], view.dtype));
        ASSERT_EQ(element(view.exact_values, view.dtype, at), rounded(values[from], view.dtype));
      }
    }
    // Slots below cluster i of level k: offsets followed down to the finest level.
    for (int k = 0; k < view.levels; ++k) {
      const LevelView& level = view.level[k];
      for (int64_t i = 0; i < level.clusters; ++i) {
        int64_t first = i, last = i + 1;
        for (int down = k; down < view.levels; ++down) {
          const uint32_t* offsets = view.level[down].offsets + h * (view.level[down].clusters + 1);
          first = offsets[first];
          last = offsets[last];
        }
        ASSERT_LT(first, last);
        for (int64_t c = 0; c < kDim; ++c) {
          double key = 0, value = 0;
          for (int64_t s = first; s < last; ++s) {
            key += keys[positions[s] * kDim + c];
            value += values[positions[s] * kDim + c];
          }
          const auto size = static_cast<double>(last - first);
          const int64_t at = (h * level.clusters + i) * kDim + c;
          const double step = view.dtype == DType::kF16 ? 0x1p-10 : 0x1p-7;  // half a unit + sums
          ASSERT_NEAR(element(level.centroids, view.dtype, at), key / size,
                      std::abs(key / size) * step + 1e-6);
          ASSERT_NEAR(element(level.value_means, view.dtype, at), value / size,
                      std::abs(value / size) * step + 1e-6);
        }
      }
    }
  }
}

TEST_F(BuilderTest, FileHoldsWhatWasBuilt) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    BuildOptions options = make_options();
    options.dtype = dtype;
    options.level_fractions = {0.01, 0.03, 0.1};
    const std::string to = path(std::string(dtype_name(dtype)));
    const auto report = build(to, make_model(), options);
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->tokens, kTokens);
    EXPECT_EQ(report->clustered, 676);
    EXPECT_EQ(report->clusters, (std::vector<int64_t>{7, 21, 70}));
    EXPECT_EQ(report->engine, "faiss");
    EXPECT_EQ(report->bytes, std::filesystem::file_size(to));

    const auto file = SqzFile::open(to);
    ASSERT_TRUE(file.ok()) << file.status().message();
    const SqzFile& index = *file.value();
    EXPECT_EQ(index.metadata().levels, 3);
    EXPECT_EQ(index.metadata().tokens, kTokens);
    EXPECT_EQ(index.metadata().model, make_model());
    for (int64_t l = 0; l < kLayers; ++l) {
      check_sparse_layer(index.layer(l), make_layer(static_cast<uint64_t>(l)), options);
    }
    const auto calibration = index.calibration();
    ASSERT_TRUE(calibration.ok());
    EXPECT_EQ(calibration->queries, 20);
    EXPECT_EQ(calibration->source, "tail");
    const auto verified = index.verify();
    ASSERT_TRUE(verified.ok());
    EXPECT_EQ(verified->problems, std::vector<std::string>());
    const auto [code, said] = testing::check_index(to);  // means, too
    EXPECT_LE(code, 0) << said;
  }
}

TEST_F(BuilderTest, SameBytesForAnyThreadsAndEveryTime) {
  BuildOptions options = make_options();
  std::vector<std::string> built;
  for (int threads : {1, 2, 2, 5}) {
    options.threads = threads;
    const std::string to = path(concat(built.size(), ".sqz"));
    ASSERT_TRUE(build(to, make_model(), options).ok());
    built.push_back(bytes_of(to));
    EXPECT_TRUE(built.back() == built.front()) << threads << " threads";
  }
  options.seed = 1;
  ASSERT_TRUE(build(path("other.sqz"), make_model(), options).ok());
  EXPECT_FALSE(bytes_of(path("other.sqz")) == built.front()) << "the seed changed nothing";
}

TEST_F(BuilderTest, PlanIsWhatIsBuilt) {
  const BuildOptions options = make_options();
  const auto plan = IndexBuilder::plan(make_model(), kTokens, options);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_TRUE(files().empty());
  const auto report = build(path(), make_model(), options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(plan->bytes, report->bytes);
  EXPECT_EQ(plan->clusters, report->clusters);
  // 676 keys to 35 clusters and these to 7, 16 dimensions, 11 assignments, 3 layers x 2 heads
  EXPECT_DOUBLE_EQ(plan->kmeans_flop, 2.0 * (676 * 35 + 35 * 7) * 16 * 11 * 6);
  EXPECT_GT(plan->peak_memory, 4u * kHeads * kTokens * kDim);
  const auto file = SqzFile::open(path());
  ASSERT_TRUE(file.ok());
  check_sparse_layer(file.value()->layer(1), make_layer(1), options);
}

TEST_F(BuilderTest, SlidingWindowLayersKeepTheirWindow) {
  ModelDescription model = make_model();
  model.sliding_window = {0, 128, 4096};
  ASSERT_TRUE(build(path(), model, make_options()).ok());
  const auto file = SqzFile::open(path());
  ASSERT_TRUE(file.ok()) << file.status().message();
  check_sparse_layer(file.value()->layer(0), make_layer(0), make_options());
  for (int64_t l : {1, 2}) {
    const LayerView view = file.value()->layer(l);
    const int64_t kept = l == 1 ? 128 : kTokens;
    EXPECT_EQ(view.levels, 0);
    EXPECT_EQ(view.slots, 0);
    ASSERT_EQ(view.exact, kept);
    const Layer layer = make_layer(static_cast<uint64_t>(l));
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < kept * kDim; ++i) {
        const int64_t from = (h * kTokens + kTokens - kept) * kDim + i;
        ASSERT_EQ(element(view.exact_keys, view.dtype, h * kept * kDim + i),
                  rounded(layer.keys[from], view.dtype));
        ASSERT_EQ(element(view.exact_values, view.dtype, h * kept * kDim + i),
                  rounded(layer.values[from], view.dtype));
      }
    }
  }
  EXPECT_TRUE(file.value()->verify()->problems.empty());
}

TEST_F(BuilderTest, OnlySlidingWindowsNeedNoQueriesAndNoLength) {
  ModelDescription model = make_model();
  model.sliding_window.assign(kLayers, 64);
  auto builder =
      IndexBuilder::create(Env::posix(), path(), false, model, make_tokens(3), "", make_options());
  ASSERT_TRUE(builder.ok()) << builder.status().message();
  const std::vector<float> data(kHeads * 3 * kDim, 1.0f);
  for (int64_t l = 0; l < kLayers; ++l) {
    ASSERT_TRUE(builder.value()->add_layer(l, {data, data, {}}).ok());
  }
  const auto report = builder.value()->finish();
  ASSERT_TRUE(report.ok()) << report.status().message();
  const auto file = SqzFile::open(path());
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file.value()->layer(2).exact, 3);
}

TEST_F(BuilderTest, ProgressCountsHeads) {
  auto builder = IndexBuilder::create(Env::posix(), path(), false, make_model(), make_tokens(), "",
                                      make_options());
  ASSERT_TRUE(builder.ok());
  std::vector<int64_t> seen;
  ASSERT_TRUE(builder.value()
                  ->add_layer(0, make_layer(0).input(),
                              [&](int64_t done, int64_t total) {
                                EXPECT_EQ(total, kHeads);
                                seen.push_back(done);
                              })
                  .ok());
  EXPECT_EQ(seen, (std::vector<int64_t>{1, 2}));
}

TEST_F(BuilderTest, BadNumbersNameLayerHeadAndToken) {
  const float infinity = std::numeric_limits<float>::infinity();
  Layer layer = make_layer(0);
  layer.keys[(kTokens + 42) * kDim + 3] = std::nanf("");
  Status status = add_first(layer);
  EXPECT_EQ(status.code(), Code::kNumeric);
  EXPECT_NE(status.message().find("layer 0, KV head 1, token 42: key"), std::string::npos)
      << status.message();

  layer = make_layer(0);
  layer.values[699 * kDim] = -infinity;
  status = add_first(layer);
  EXPECT_EQ(status.code(), Code::kNumeric);
  EXPECT_NE(status.message().find("layer 0, KV head 0, token 699: value"), std::string::npos)
      << status.message();

  layer = make_layer(0);
  layer.queries[(3 * 20 + 7) * kDim] = infinity;
  status = add_first(layer);
  EXPECT_EQ(status.code(), Code::kNumeric);
  EXPECT_NE(status.message().find("query head 3, token 7: query"), std::string::npos)
      << status.message();

  layer = make_layer(0);
  layer.keys[0] = 70000.0f;  // finite, beyond float16
  EXPECT_TRUE(add_first(layer).ok());
  BuildOptions options = make_options();
  options.dtype = DType::kF16;
  status = add_first(layer, options);
  EXPECT_EQ(status.code(), Code::kNumeric);
  EXPECT_NE(status.message().find("F16"), std::string::npos) << status.message();
  EXPECT_TRUE(files().empty()) << "a failed build left " << files()[0];
}

TEST_F(BuilderTest, TooShortTextSaysHowMuchIsNeeded) {
  const auto create = [&](int64_t tokens) {
    return IndexBuilder::create(Env::posix(), path(), false, make_model(), make_tokens(tokens), "",
                                make_options())
        .status();
  };
  for (int64_t tokens : {1, 24, 25}) {
    const Status status = create(tokens);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("at least 26"), std::string::npos) << status.message();
    EXPECT_EQ(IndexBuilder::plan(make_model(), tokens, make_options()).status().message(),
              status.message());
  }
  EXPECT_FALSE(create(0).ok());
  EXPECT_TRUE(files().empty());
  EXPECT_TRUE(create(26).ok());
}

TEST_F(BuilderTest, ShortestTextBuilds) {
  auto builder = IndexBuilder::create(Env::posix(), path(), false, make_model(), make_tokens(26),
                                      "", make_options());
  ASSERT_TRUE(builder.ok());
  for (int64_t l = 0; l < kLayers; ++l) {
    Layer layer = make_layer(0);
    layer.keys.resize(kHeads * 26 * kDim);
    layer.values.resize(kHeads * 26 * kDim);
    ASSERT_TRUE(builder.value()->add_layer(l, layer.input()).ok());
  }
  ASSERT_TRUE(builder.value()->finish().ok());
  const auto file = SqzFile::open(path());
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE(file.value()->verify()->problems.empty());
}

TEST_F(BuilderTest, OptionsAreChecked) {
  const auto expect_bad = [&](const char* field, const auto& change) {
    BuildOptions options = make_options();
    change(options);
    const Status status =
        IndexBuilder::create(Env::posix(), path(), false, make_model(), make_tokens(), "", options)
            .status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << field;
    EXPECT_NE(status.message().find(field), std::string::npos) << status.message();
  };
  expect_bad("sink", [](BuildOptions& o) { o.sink = -1; });
  expect_bad("tail", [](BuildOptions& o) { o.tail = 0; });
  expect_bad("levels", [](BuildOptions& o) { o.level_fractions = {}; });
  expect_bad("levels", [](BuildOptions& o) { o.level_fractions = {.01, .02, .03, .04, .05}; });
  expect_bad("clusters per token", [](BuildOptions& o) { o.level_fractions = {0.05, 0.01}; });
  expect_bad("clusters per token", [](BuildOptions& o) { o.level_fractions = {1.5}; });
  expect_bad("clusters per token", [](BuildOptions& o) { o.level_fractions = {std::nan("")}; });
  expect_bad("coarse keep", [](BuildOptions& o) { o.coarse_keep = 0; });
  expect_bad("iterations", [](BuildOptions& o) { o.iterations = 0; });
  expect_bad("threads", [](BuildOptions& o) { o.threads = -2; });
  expect_bad("dtype", [](BuildOptions& o) { o.dtype = DType::kF32; });
  expect_bad("engine", [](BuildOptions& o) { o.engine = "abacus"; });
  EXPECT_TRUE(files().empty());
}

TEST_F(BuilderTest, LayersComeInOrderAndComplete) {
  const Layer layer = make_layer(0);
  const auto fresh = [&] {
    return IndexBuilder::create(Env::posix(), path(), false, make_model(), make_tokens(), "",
                                make_options())
        .value();
  };
  EXPECT_EQ(fresh()->add_layer(1, layer.input()).code(), Code::kInvalidArgument);
  EXPECT_EQ(fresh()->finish().status().code(), Code::kInvalidArgument);
  Layer cut = layer;
  cut.keys.pop_back();
  EXPECT_EQ(fresh()->add_layer(0, cut.input()).code(), Code::kInvalidArgument);
  cut = layer;
  cut.queries.clear();
  EXPECT_EQ(fresh()->add_layer(0, cut.input()).code(), Code::kInvalidArgument);
  auto builder = fresh();
  ASSERT_TRUE(builder->add_layer(0, layer.input()).ok());
  EXPECT_EQ(builder->add_layer(1, make_layer(1, 19).input()).code(), Code::kInvalidArgument);
  EXPECT_EQ(builder->add_layer(1, layer.input()).code(), Code::kInvalidArgument)
      << "a failed build goes on";
  builder.reset();
  EXPECT_TRUE(files().empty());
}

TEST_F(BuilderTest, CpuEngineTakesNoRowsOnADevice) {
  auto builder = IndexBuilder::create(Env::posix(), path(), false, make_model(), make_tokens(), "",
                                      make_options())
                     .value();
  EXPECT_FALSE(builder->takes_device_rows());
  const DeviceRows rows;
  LayerInput input = make_layer(0).input();
  input.device = &rows;
  EXPECT_EQ(builder->add_layer(0, input).code(), Code::kInvalidArgument);
}

TEST_F(BuilderTest, ExistingFileIsKept) {
  std::ofstream(path()) << "precious";
  EXPECT_EQ(build(path(), make_model(), make_options()).status().code(), Code::kExists);
  EXPECT_EQ(bytes_of(path()), "precious");
}

TEST_F(BuilderTest, FailingDiskLeavesNothing) {
  testing::FailNth none;
  testing::FaultEnv counting(none.hook());
  ASSERT_TRUE(build(path(), make_model(), make_options(), counting).ok());
  std::filesystem::remove(path());
  const auto calls = static_cast<int>(none.calls.size());
  ASSERT_GT(calls, 10);
  for (int n = 0; n < calls; ++n) {
    testing::FailNth fail;
    fail.fail_at = n;
    testing::FaultEnv env(fail.hook());
    const Status status = build(path(), make_model(), make_options(), env).status();
    EXPECT_EQ(status.code(), Code::kIo) << "call " << n << " (" << none.calls[n] << ")";
    if (testing::is_after_publishing(none.calls[n])) {
      // The file is already in place then, and whole.
      EXPECT_EQ(files(), std::vector<std::string>{"a.sqz"});
      EXPECT_TRUE(SqzFile::open(path()).ok());
    } else {
      EXPECT_TRUE(files().empty())
          << "call " << n << " (" << none.calls[n] << ") left " << files()[0];
    }
    std::filesystem::remove(path());
  }
}

}  // namespace
}  // namespace sqz
