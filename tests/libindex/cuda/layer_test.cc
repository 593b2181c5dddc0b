// A whole layer on the GPU against its definition, and against the CPU engine where the two must
// agree.
#include <gtest/gtest.h>

#include <cmath>

#include "formats/sqz_file.h"
#include "libindex/builder.h"
#include "libindex/cuda/layer_engine.h"
#include "libindex/layer_store.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_model.h"
#include "tests/libindex/clustered_data.h"
#include "tests/libindex/cuda/device.h"
#include "tests/libindex/head_check.h"

namespace sqz {
namespace {

using cuda::CudaLayerEngine;
using cuda::test::DeviceArray;

struct Layer {
  int64_t heads, tokens, dim, sink, tail;
  std::vector<int64_t> clusters;
  DType dtype = DType::kBF16;
  std::vector<float> keys, values;

  int64_t clustered() const { return tokens - sink - tail; }
  LayerProblem problem() const {
    LayerProblem problem;
    problem.heads = heads;
    problem.tokens = tokens;
    problem.dim = dim;
    problem.sink = sink;
    problem.clustered = clustered();
    problem.tree = {clusters, 10, 3, 1, 2};
    problem.dtype = dtype;
    problem.keys = keys;
    problem.values = values;
    return problem;
  }
};

Layer make_layer(int64_t heads, int64_t tokens, int64_t dim, std::vector<int64_t> clusters,
                 DType dtype = DType::kBF16) {
  Layer layer{heads, tokens, dim, 5, 20, std::move(clusters), dtype, {}, {}};
  for (int64_t h = 0; h < heads; ++h) {
    const auto keys = test::clustered_points(tokens, dim, 40, 0.6f, static_cast<uint64_t>(10 + h));
    layer.keys.insert(layer.keys.end(), keys.begin(), keys.end());
  }
  layer.values = test::clustered_points(heads * tokens, dim, 60, 0.6f, 99);
  return layer;
}

LayerBuffers fill(const Layer& layer, CudaLayerEngine& engine, const DeviceRows* rows = nullptr) {
  LayerProblem problem = layer.problem();
  if (rows != nullptr) {
    problem.device = rows;
    problem.keys = problem.values = {};
  }
  LayerBuffers buffers;
  int64_t last = 0;
  const Status status = engine.fill(
      problem,
      [&](int64_t done, int64_t total) {
        EXPECT_GT(done, last);
        EXPECT_EQ(total, layer.heads);
        last = done;
      },
      buffers);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(last, layer.heads);
  return buffers;
}

void expect_equal(const LayerBuffers& a, const LayerBuffers& b) {
  ASSERT_EQ(a.levels.size(), b.levels.size());
  for (size_t k = 0; k < a.levels.size(); ++k) {
    EXPECT_EQ(a.levels[k].centroids, b.levels[k].centroids);
    EXPECT_EQ(a.levels[k].value_means, b.levels[k].value_means);
    EXPECT_EQ(a.levels[k].offsets, b.levels[k].offsets);
  }
  EXPECT_EQ(a.positions, b.positions);
  EXPECT_EQ(a.keys, b.keys);
  EXPECT_EQ(a.values, b.values);
  EXPECT_EQ(a.exact_keys, b.exact_keys);
  EXPECT_EQ(a.exact_values, b.exact_values);
}

// What the float rows are once they are stored.
std::vector<float> rounded(std::vector<float> rows, DType dtype) {
  for (float& x : rows) x = static_cast<float>(test::rounded(x, dtype));
  return rows;
}

void expect_defined(const Layer& layer, const LayerBuffers& buffers) {
  LayerView view;
  view.dtype = layer.dtype;
  view.kv_heads = layer.heads;
  view.head_dim = view.value_dim = layer.dim;
  view.levels = static_cast<int>(layer.clusters.size());
  for (size_t k = 0; k < layer.clusters.size(); ++k) {
    const LayerBuffers::Level& level = buffers.levels[k];
    view.level[k] = {layer.clusters[k], level.centroids.data(), level.offsets.data(),
                     level.value_means.data()};
  }
  view.slots = layer.clustered();
  view.positions = buffers.positions.data();
  view.keys = buffers.keys.data();
  view.values = buffers.values.data();
  view.exact = layer.sink + layer.tail;
  view.exact_keys = buffers.exact_keys.data();
  view.exact_values = buffers.exact_values.data();
  const auto keys = rounded(layer.keys, layer.dtype), values = rounded(layer.values, layer.dtype);
  for (int64_t h = 0; h < layer.heads; ++h) {
    test::HeadCheck(view, keys, values, layer.tokens, layer.sink, h).all();
  }
}

void check(const Layer& layer) {
  CudaLayerEngine engine(0);
  const LayerBuffers buffers = fill(layer, engine);
  expect_defined(layer, buffers);
  expect_equal(fill(layer, engine), buffers);  // the same bytes again
}

TEST(CudaLayer, IsWhatTheFileSays) {
  SQZ_SKIP_WITHOUT_GPU();
  check(make_layer(3, 1333, 64, {14, 67}));
  check(make_layer(2, 700, 128, {35}));
  check(make_layer(1, 900, 64, {3, 11, 60}));
  check(make_layer(2, 9025, 96, {40, 2500}));
}

TEST(CudaLayer, DimensionsThatNoKernelHas) {
  SQZ_SKIP_WITHOUT_GPU();
  check(make_layer(2, 500, 8, {5, 25}));
  check(make_layer(2, 500, 32, {5, 25}));
  check(make_layer(1, 500, 40, {5, 25}));
  check(make_layer(1, 400, 144, {4, 20}));
  check(make_layer(1, 400, 256, {4, 20}));
}

TEST(CudaLayer, Float16) {
  SQZ_SKIP_WITHOUT_GPU();
  check(make_layer(2, 800, 64, {8, 40}, DType::kF16));
  check(make_layer(1, 500, 80, {8, 40}, DType::kF16));
}

TEST(CudaLayer, OneClusterAndAsManyAsKeys) {
  SQZ_SKIP_WITHOUT_GPU();
  check(make_layer(2, 300, 64, {1}));
  check(make_layer(2, 300, 64, {1, 1}));
  check(make_layer(1, 125, 64, {100}));
  check(make_layer(1, 125, 64, {100, 100}));
  check(make_layer(1, 27, 64, {1, 2}));
}

TEST(CudaLayer, OneClusterOfHalfTheKeys) {
  SQZ_SKIP_WITHOUT_GPU();
  Layer layer = make_layer(1, 6000, 64, {60, 300});
  for (int64_t t = 0; t < layer.tokens; t += 2) {
    for (int64_t c = 0; c < layer.dim; ++c) {
      layer.keys[static_cast<size_t>(t * layer.dim + c)] = c == 0 ? 10.0f : 0.0f;
    }
  }
  check(layer);
}

TEST(CudaLayer, FromDeviceMemoryAsFromTheHost) {
  SQZ_SKIP_WITHOUT_GPU();
  CudaLayerEngine engine(0);
  const Layer layer = make_layer(3, 1000, 64, {10, 50});
  const LayerBuffers expected = fill(layer, engine);
  const int64_t capacity = 1100, head = layer.tokens * layer.dim;  // heads are further apart
  std::vector<float> wide(static_cast<size_t>(3 * capacity * layer.dim), NAN), wide_values = wide;
  std::vector<uint16_t> narrow(wide.size(), 0x7FC0), narrow_values = narrow;
  for (int64_t h = 0; h < 3; ++h) {
    for (int64_t i = 0; i < head; ++i) {
      const auto to = static_cast<size_t>(h * capacity * layer.dim + i);
      const auto from = static_cast<size_t>(h * head + i);
      wide[to] = layer.keys[from];
      wide_values[to] = layer.values[from];
      narrow[to] = to_bfloat16(layer.keys[from]).bits;
      narrow_values[to] = to_bfloat16(layer.values[from]).bits;
    }
  }
  DeviceArray<float> keys(wide), values(wide_values);
  DeviceRows rows{keys.get(), values.get(), DType::kF32, capacity * layer.dim, 0};
  expect_equal(fill(layer, engine, &rows), expected);
  DeviceArray<uint16_t> keys16(narrow), values16(narrow_values);
  rows = {keys16.get(), values16.get(), DType::kBF16, capacity * layer.dim, 0};
  expect_equal(fill(layer, engine, &rows), expected);
}

TEST(CudaLayerMemory, OfOneHeadAndOfAll) {
  const CudaLayerEngine engine(0);
  const Layer five = make_layer(5, 2000, 64, {20, 100}), one = make_layer(1, 2000, 64, {20, 100});
  const LayerMemory memory = engine.memory(five.problem()).value();
  const LayerMemory alone = engine.memory(one.problem()).value();
  EXPECT_EQ(alone.whole, alone.least);
  EXPECT_EQ(memory.least, alone.least);
  EXPECT_GT(memory.whole, 4 * memory.least);
  EXPECT_LE(memory.whole, 5 * memory.least);
  const DeviceRows rows;
  LayerProblem problem = five.problem();
  problem.device = &rows;  // no float copy of what came from the host
  EXPECT_LT(engine.memory(problem)->whole, memory.whole);
}

// Heads are made in groups that fit, with the same bytes.
TEST(CudaLayer, NeedsTheMemoryThatWasPlanned) {
  SQZ_SKIP_WITHOUT_GPU();
  const Layer layer = make_layer(5, 2000, 64, {20, 100});
  CudaLayerEngine whole(0);
  const LayerBuffers expected = fill(layer, whole);
  const LayerMemory planned = whole.memory(layer.problem()).value();
  const auto groups = [&](size_t bytes) {
    CudaLayerEngine engine(0);
    engine.limit_memory(bytes);
    int64_t count = 0;
    LayerBuffers buffers;
    const Status status = engine.fill(
        layer.problem(), [&](int64_t, int64_t) { ++count; }, buffers);
    if (status.ok()) {
      expect_equal(buffers, expected);
      return count;
    }
    EXPECT_EQ(status.code(), Code::kOutOfMemory);
    EXPECT_NE(status.message().find("one KV head of 2000 tokens"), std::string::npos)
        << status.message();
    return int64_t{-1};
  };
  EXPECT_EQ(groups(planned.whole), 1);
  EXPECT_EQ(groups(planned.whole - 1), 2);
  EXPECT_EQ(groups(planned.least), 5);
  EXPECT_EQ(groups(planned.least - 1), -1);
}

TEST(CudaLayer, NotFiniteNamesThePlace) {
  SQZ_SKIP_WITHOUT_GPU();
  CudaLayerEngine engine(0);
  for (const bool values : {false, true}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Layer layer = make_layer(3, 500, 64, {5, 25}, dtype);
      auto& data = values ? layer.values : layer.keys;
      // The first by head and token is named; f16 ends at 65504.
      data[(1 * 500 + 499) * 64 + 7] = dtype == DType::kF16 ? 70000.0f : INFINITY;
      data[(2 * 500 + 3) * 64] = NAN;
      const Status expected =
          check_storable(data, 3, 64, dtype, 1, "KV head", values ? "value" : "key", 1);
      ASSERT_EQ(expected.code(), Code::kNumeric);
      LayerBuffers buffers;
      const Status status = engine.fill(layer.problem(), {}, buffers);
      EXPECT_EQ(status.code(), Code::kNumeric);
      EXPECT_EQ(status.message(), expected.message());
      DeviceArray<float> keys_d(layer.keys), values_d(layer.values);
      const DeviceRows rows{keys_d.get(), values_d.get(), DType::kF32, 500 * 64, 0};
      LayerProblem problem = layer.problem();
      problem.device = &rows;
      EXPECT_EQ(engine.fill(problem, {}, buffers).message(), expected.message());
    }
  }
  Layer layer = make_layer(1, 500, 64, {5, 25});
  layer.keys[64 * 100] = 1e20f;  // finite, but its norm is not for the kernels
  LayerBuffers buffers;
  EXPECT_EQ(engine.fill(layer.problem(), {}, buffers).code(), Code::kNumeric);
}

TEST(CudaLayer, DenseLayersFromTheDevice) {
  SQZ_SKIP_WITHOUT_GPU();
  const Layer layer = make_layer(2, 300, 40, {1});
  DeviceArray<float> keys(layer.keys), values(layer.values);
  const DeviceRows rows{keys.get(), values.get(), DType::kF32, 300 * 40, 0};
  LayerProblem problem = layer.problem();
  problem.device = &rows;
  problem.clustered = 0;
  problem.tree.clusters.clear();
  problem.sink = 111;
  LayerBuffers buffers;
  CudaLayerEngine engine(0);
  const Status status = engine.fill(problem, {}, buffers);
  ASSERT_TRUE(status.ok()) << status.message();
  LayerStore store(2, 300, 40, DType::kBF16);
  ASSERT_TRUE(store.fill_dense(layer.keys.data(), layer.values.data(), 111, 1).ok());
  expect_equal(buffers, store.buffers());
}

// Whole builds: the file is valid, and the same from run to run.
TEST(CudaBuild, VerifiesAndRepeats) {
  SQZ_SKIP_WITHOUT_GPU();
  const testing::TemporaryDirectory folder;
  ModelDescription model = testing::tiny_model(3, 4, 2, 64);
  model.sliding_window[1] = 200;
  const std::vector<int32_t> tokens(900, 1);
  BuildOptions options;
  options.engine = "cuda";
  std::string bytes[2];
  for (std::string& content : bytes) {
    const std::string path = folder.file("a.sqz");
    auto builder = IndexBuilder::create(Env::posix(), path, true, model, tokens, "", options);
    ASSERT_TRUE(builder.ok()) << builder.status().message();
    EXPECT_TRUE(builder.value()->takes_device_rows());
    const auto queries = test::clustered_points(4 * 100, 64, 5, 1.0f, 8);
    for (int64_t l = 0; l < 3; ++l) {
      const Layer layer = make_layer(2, 900, 64, {});
      DeviceArray<float> keys(layer.keys), values(layer.values);
      const DeviceRows rows{keys.get(), values.get(), DType::kF32, 900 * 64, 0};
      LayerInput input{layer.keys, layer.values, queries};
      if (l < 2) input = {{}, {}, queries, &rows};
      const Status status = builder.value()->add_layer(l, input);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    const auto report = builder.value()->finish();
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->engine.rfind("cuda (", 0), 0u);
    const auto file = SqzFile::open(path);
    ASSERT_TRUE(file.ok()) << file.status().message();
    EXPECT_EQ(file.value()->verify().message(), "");
    content = testing::read_file(path);
  }
  EXPECT_TRUE(bytes[0] == bytes[1]);
  EXPECT_GT(bytes[0].size(), 100000u);
}

}  // namespace
}  // namespace sqz
