// A whole layer on the GPU against its definition, computed here in float64: slot order, means,
// rows; and against the CPU engine where the two must agree.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "formats/sqz_file.h"
#include "libindex/builder.h"
#include "libindex/cuda/layer_engine.h"
#include "libindex/layer_store.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_model.h"
#include "tests/libindex/clustered_data.h"
#include "tests/libindex/cuda/device.h"

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

float rounded(float x, DType dtype) {
  return dtype == DType::kF16 ? to_float(to_float16(x)) : to_float(to_bfloat16(x));
}

float stored(const std::vector<std::byte>& data, int64_t index, DType dtype) {
  uint16_t bits;
  std::memcpy(&bits, data.data() + 2 * index, 2);
  return dtype == DType::kF16 ? to_float(Float16{bits}) : to_float(BFloat16{bits});
}

// One head of what was made, against its definition.
class HeadCheck {
 public:
  HeadCheck(const Layer& layer, const LayerBuffers& buffers, int64_t head)
      : layer_(layer), buffers_(buffers), head_(head) {
    for (size_t k = 0; k < layer.clusters.size(); ++k) {
      const auto n = layer.clusters[k] + 1;
      const auto begin = buffers.levels[k].offsets.begin() + head * n;
      offsets_.emplace_back(begin, begin + n);
    }
  }

  void all() {
    nesting();
    rows();
    means();
    chain();
  }

 private:
  float key(int64_t token, int64_t c) const {
    return rounded(layer_.keys[at(token, c)], layer_.dtype);
  }
  float value(int64_t token, int64_t c) const {
    return rounded(layer_.values[at(token, c)], layer_.dtype);
  }
  size_t at(int64_t token, int64_t c) const {
    return static_cast<size_t>((head_ * layer_.tokens + token) * layer_.dim + c);
  }
  uint32_t position(int64_t slot) const {
    return buffers_.positions[static_cast<size_t>(head_ * layer_.clustered() + slot)];
  }

  void nesting() {
    for (size_t k = 0; k < offsets_.size(); ++k) {
      const bool finest = k + 1 == offsets_.size();
      EXPECT_EQ(offsets_[k].front(), 0u);
      EXPECT_EQ(offsets_[k].back(), finest ? layer_.clustered() : layer_.clusters[k + 1]);
      for (size_t i = 1; i < offsets_[k].size(); ++i) {
        ASSERT_LT(offsets_[k][i - 1], offsets_[k][i]) << "level " << k << " cluster " << i - 1;
      }
    }
    std::vector<uint32_t> sorted;
    for (int64_t s = 0; s < layer_.clustered(); ++s) sorted.push_back(position(s));
    const std::vector<uint32_t>& fine = offsets_.back();
    for (size_t i = 0; i + 1 < fine.size(); ++i) {
      EXPECT_TRUE(std::is_sorted(sorted.begin() + fine[i], sorted.begin() + fine[i + 1]));
    }
    std::sort(sorted.begin(), sorted.end());
    std::vector<uint32_t> all(sorted.size());
    std::iota(all.begin(), all.end(), static_cast<uint32_t>(layer_.sink));
    EXPECT_EQ(sorted, all);
  }

  void rows() {
    for (int64_t s = 0; s < layer_.clustered(); ++s) {
      for (int64_t c = 0; c < layer_.dim; ++c) {
        const int64_t i = (head_ * layer_.clustered() + s) * layer_.dim + c;
        ASSERT_EQ(stored(buffers_.keys, i, layer_.dtype), key(position(s), c));
        ASSERT_EQ(stored(buffers_.values, i, layer_.dtype), value(position(s), c));
      }
    }
    const int64_t exact = layer_.sink + layer_.tail;
    for (int64_t e = 0; e < exact; ++e) {
      const int64_t token = e < layer_.sink ? e : e + layer_.clustered();
      for (int64_t c = 0; c < layer_.dim; ++c) {
        const int64_t i = (head_ * exact + e) * layer_.dim + c;
        ASSERT_EQ(stored(buffers_.exact_keys, i, layer_.dtype), key(token, c));
        ASSERT_EQ(stored(buffers_.exact_values, i, layer_.dtype), value(token, c));
      }
    }
  }

  void means() {
    const auto slots = first_slots(offsets_);
    for (size_t k = 0; k < slots.size(); ++k) {
      for (size_t i = 0; i + 1 < slots[k].size(); ++i) {
        for (int64_t c = 0; c < layer_.dim; ++c) {
          double keys = 0, values = 0;
          for (uint32_t s = slots[k][i]; s < slots[k][i + 1]; ++s) {
            keys += key(position(s), c);
            values += value(position(s), c);
          }
          const double size = slots[k][i + 1] - slots[k][i];
          const int64_t place =
              (head_ * layer_.clusters[k] + static_cast<int64_t>(i)) * layer_.dim + c;
          const double limit = layer_.dtype == DType::kF16 ? 1.0 / 1024 : 1.0 / 128;
          ASSERT_NEAR(stored(buffers_.levels[k].centroids, place, layer_.dtype), keys / size,
                      limit * std::abs(keys / size) + 1e-5)
              << "level " << k << " cluster " << i;
          ASSERT_NEAR(stored(buffers_.levels[k].value_means, place, layer_.dtype), values / size,
                      limit * std::abs(values / size) + 1e-5);
        }
      }
    }
  }

  double cosine(size_t k, size_t a, size_t b) const {
    double ab = 0, aa = 0, bb = 0;
    for (int64_t c = 0; c < layer_.dim; ++c) {
      const int64_t base = head_ * layer_.clusters[k];
      const double x = stored(buffers_.levels[k].centroids,
                              (base + static_cast<int64_t>(a)) * layer_.dim + c, layer_.dtype);
      const double y = stored(buffers_.levels[k].centroids,
                              (base + static_cast<int64_t>(b)) * layer_.dim + c, layer_.dtype);
      ab += x * y;
      aa += x * x;
      bb += y * y;
    }
    return ab / std::sqrt(aa * bb);
  }

  // Among siblings, the next cluster is the most similar to the last of those that are left.
  void chain() {
    for (size_t k = 0; k < offsets_.size(); ++k) {
      const std::vector<uint32_t> whole = {0, static_cast<uint32_t>(layer_.clusters[k])};
      const std::vector<uint32_t>& groups = k == 0 ? whole : offsets_[k - 1];
      for (size_t g = 0; g + 1 < groups.size(); ++g) {
        for (uint32_t i = std::max(groups[g], 1u); i < groups[g + 1]; ++i) {
          const double taken = cosine(k, i - 1, i);
          for (uint32_t other = i + 1; other < groups[g + 1]; ++other) {
            // Means that are stored differ a little from those that were compared.
            ASSERT_LE(cosine(k, i - 1, other), taken + 0.01) << "level " << k << " place " << i;
          }
        }
      }
    }
  }

  const Layer& layer_;
  const LayerBuffers& buffers_;
  const int64_t head_;
  std::vector<std::vector<uint32_t>> offsets_;
};

void check(const Layer& layer) {
  CudaLayerEngine engine(0);
  const LayerBuffers buffers = fill(layer, engine);
  for (int64_t h = 0; h < layer.heads; ++h) {
    SCOPED_TRACE(concat("head ", h));
    HeadCheck(layer, buffers, h).all();
  }
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
  problem.sink = 111;
  LayerBuffers buffers;
  CudaLayerEngine engine(0);
  const Status status = engine.fill_dense(problem, buffers);
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
