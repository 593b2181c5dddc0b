// Whole builds of every kind: what is in the file, and what happens to bad input and failing disks.
#include "libindex/builder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>

#include "libruntime/rope.h"
#include "tests/common/check_index.h"
#include "tests/common/must.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_qmodel.h"
#include "tests/formats/fault_env.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/libindex/clustered_data.h"
#include "tests/libindex/head_check.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kTokens = 500, kDim = 8, kHeads = 2, kQueryHeads = 4, kLayers = 3;
constexpr int64_t kSink = 4, kTail = 20, kWindow = 64, kSlots = kTokens - kSink - kTail;

// The classifier's model is that of all builds: layer 1 has a window, and is stored dense.
const QmodelFile& qmodel() {
  static const QmodelFile file = [] {
    testing::TinyQmodelOptions o;
    o.head_dim = kDim;
    o.layers = kLayers;
    o.buckets = 7;
    QmodelFile q = testing::tiny_qmodel(o);
    q.model.hidden_size = 32;
    q.model.vocab_size = 1000;
    q.model.max_positions = 4096;
    q.model.sliding_window = {0, kWindow, 0};
    return q;
  }();
  return file;
}

struct Layer {
  std::vector<float> keys, values, queries, attention;
  LayerInput input() const { return {keys, values, queries, nullptr, attention}; }
};

Layer make_layer(int64_t index, int64_t tokens = kTokens, int64_t queries = kTail) {
  const auto seed = static_cast<uint64_t>(index) * 10;
  Layer out{test::clustered_points(kHeads * tokens, kDim, 30, 0.5f, seed),
            test::clustered_points(kHeads * tokens, kDim, 30, 0.5f, seed + 1),
            test::clustered_points(kQueryHeads * queries, kDim, 5, 1.0f, seed + 2),
            {}};
  // Many tokens share an amount.
  for (int64_t i = 0; i < kHeads * tokens; ++i)
    out.attention.push_back(static_cast<float>(i * 7919 % 40));
  return out;
}

std::vector<int32_t> make_tokens(int64_t count = kTokens) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) tokens[i] = static_cast<int32_t>(i * 7 % 1000);
  return tokens;
}

class BuilderTest : public ::testing::Test {
 protected:
  BuilderTest() {
    options_.sink = kSink;
    options_.tail = kTail;
    options_.threads = 2;
    options_.engine = "faiss";  // also where there is a GPU
  }

  Result<std::unique_ptr<IndexBuilder>> prepare(const BuildOptions& options) const {
    return IndexBuilder::prepare(model_, make_tokens(), "00000000000000ab", options);
  }
  Result<BuildReport> build(const BuildOptions& options, Env& env = Env::posix()) const {
    SQZ_ASSIGN_OR_RETURN(const auto builder, prepare(options));
    SQZ_RETURN_IF_ERROR(builder->begin(env, path_, true));
    for (int64_t l = 0; l < kLayers; ++l) {
      SQZ_RETURN_IF_ERROR(builder->add_layer(l, make_layer(l).input()));
    }
    return builder->finish();
  }
  // The status of adding `layer` as the first of a build.
  Status add_first(const Layer& layer, const BuildOptions& options) const {
    SQZ_ASSIGN_OR_RETURN(const auto builder, prepare(options));
    SQZ_RETURN_IF_ERROR(builder->begin(Env::posix(), path_, true));
    return builder->add_layer(0, layer.input());
  }

  testing::TemporaryDirectory dir_;
  const std::string path_ = dir_.file("a.sqz");
  ModelDescription model_ = qmodel().model;
  BuildOptions options_;
};

struct Kind {
  const char* name;
  void (*change)(BuildOptions&);
};

class Builds : public BuilderTest, public ::testing::WithParamInterface<Kind> {
 protected:
  Builds() {
    if (GetParam().change) GetParam().change(options_);
  }
  void expect_pages(const LayerView& view, int64_t head) const;
  void expect_buckets(const LayerView& view, int64_t head) const;
};

constexpr Kind kKinds[] = {{"Clusters", nullptr},
                           {"ThreeLevelsF16",
                            [](BuildOptions& o) {
                              o.level_fractions = {0.01, 0.03, 0.1};
                              o.dtype = DType::kF16;
                            }},
                           {"ClustersHitters", [](BuildOptions& o) { o.heavy_hitters = true; }},
                           {"Pages", [](BuildOptions& o) { o.partition = Partition::kPages; }},
                           {"PagesOfOneF16",
                            [](BuildOptions& o) {
                              o.partition = Partition::kPages;
                              o.page_size = 1;
                              o.dtype = DType::kF16;
                            }},
                           {"OnePageHitters",
                            [](BuildOptions& o) {
                              o.partition = Partition::kPages;
                              o.page_size = 1000;
                              o.heavy_hitters = true;
                            }},
                           {"Buckets", [](BuildOptions& o) {
                              o.partition = Partition::kBuckets;
                              o.qmodel = &qmodel();
                            }}};
INSTANTIATE_TEST_SUITE_P(Kinds, Builds, ::testing::ValuesIn(kKinds),
                         [](const auto& kind) { return kind.param.name; });

// In token order, with the range of each page's keys.
void Builds::expect_pages(const LayerView& view, int64_t head) const {
  for (int64_t s = 0; s < view.slots; ++s) {
    ASSERT_EQ(view.positions[head * view.slots + s], kSink + s);
    for (int64_t c = 0; c < kDim; ++c) {
      const double key = test::element(view.dtype, view.keys, (head * view.slots + s) * kDim + c);
      const int64_t bound = (head * view.pages + s / options_.page_size) * kDim + c;
      ASSERT_LE(test::element(view.dtype, view.page_min, bound), key);
      ASSERT_GE(test::element(view.dtype, view.page_max, bound), key);
    }
  }
}

// Every key in the bucket of the nearest centroid before RoPE, in float64 and with the angles of
// the definition; a bucket's keys in token order.
void Builds::expect_buckets(const LayerView& view, int64_t head) const {
  const auto frequencies = rope_frequencies(qmodel().model.rope, kDim);
  const uint32_t* offsets = view.bucket_offsets + head * (view.buckets + 1);
  ASSERT_EQ(offsets[view.buckets], kSlots);
  for (int64_t b = 0; b < view.buckets; ++b) {
    for (int64_t s = offsets[b]; s < offsets[b + 1]; ++s) {
      const int64_t slot = head * view.slots + s, token = view.positions[slot];
      ASSERT_TRUE(s == offsets[b] || token > view.positions[slot - 1]);
      std::vector<double> back(kDim);
      for (int64_t i = 0; i < kDim / 2; ++i) {
        const double angle = static_cast<double>(token) * double{frequencies[i]};
        const double x = test::element(view.dtype, view.keys, slot * kDim + i),
                     y = test::element(view.dtype, view.keys, slot * kDim + i + kDim / 2);
        back[i] = x * std::cos(angle) + y * std::sin(angle);
        back[i + kDim / 2] = y * std::cos(angle) - x * std::sin(angle);
      }
      std::vector<double> products;
      for (int64_t other = 0; other < view.buckets; ++other) {
        const float* centroid = view.classifier.centroids + (head * view.buckets + other) * kDim;
        products.push_back(std::inner_product(back.begin(), back.end(), centroid, 0.0));
      }
      ASSERT_EQ(std::max_element(products.begin(), products.end()) - products.begin(), b);
    }
  }
}

TEST_P(Builds, HoldEveryKeyOnce) {
  const auto planned = must(prepare(options_));
  const auto plan = planned->plan();
  ASSERT_THAT(dir_.names(), IsEmpty());
  const auto report = must(build(options_));
  EXPECT_EQ(report.bytes, std::filesystem::file_size(path_));
  EXPECT_EQ(plan->bytes, report.bytes);
  EXPECT_GT(plan->peak_memory, 4u * kHeads * kTokens * kDim);
  const auto opened = must(SqzFile::open(path_));
  const SqzFile& file = *opened;
  EXPECT_EQ(file.verify().message(), "");
  const auto [code, said] = testing::check_index(path_);
  EXPECT_LE(code, 0) << said;
  EXPECT_EQ(file.metadata().model, model_);
  EXPECT_EQ(file.calibration()->source, options_.partition == Partition::kKmeans ? "tail" : "");
  for (int64_t l = 0; l < kLayers; ++l) {
    const LayerView view = file.layer(l);
    const Layer layer = make_layer(l);
    // tiny_qmodel() trains no first layer: its buckets are dense there, as layers with a window.
    const bool dense = l == 1 || (options_.qmodel != nullptr && l == 0);
    ASSERT_EQ(view.slots, dense ? 0 : kSlots);
    ASSERT_EQ(view.exact, l == 1 ? kWindow : dense ? kTokens : kSink + kTail);
    EXPECT_EQ(view.heavy != nullptr, options_.heavy_hitters && !dense);
    if (view.buckets > 0) {
      const QmodelLayer& trained = qmodel().layers[static_cast<size_t>(l)];
      for (const auto& [found, wanted] : {std::pair(view.classifier.centroids, &trained.centroids),
                                          {view.classifier.hidden_weight, &trained.hidden_weight},
                                          {view.classifier.hidden_bias, &trained.hidden_bias},
                                          {view.classifier.output_weight, &trained.output_weight},
                                          {view.classifier.output_bias, &trained.output_bias}}) {
        EXPECT_TRUE(std::equal(wanted->begin(), wanted->end(), found));
      }
    }
    for (int64_t h = 0; h < kHeads; ++h) {
      test::HeadCheck(view, layer.keys, layer.values, kTokens, dense ? 0 : kSink, h).all();
      if (dense) continue;
      const uint32_t* positions = view.positions + h * kSlots;
      // Heavy hitters come by attention, of equal ones the earlier token first.
      for (int64_t rank = 1; view.heavy != nullptr && rank < kSlots; ++rank) {
        const uint32_t* heavy = view.heavy + h * kSlots + rank;
        const uint32_t before = positions[heavy[-1]], after = positions[heavy[0]];
        const float more = layer.attention[h * kTokens + before],
                    less = layer.attention[h * kTokens + after];
        ASSERT_TRUE(more > less || (more == less && before < after)) << "rank " << rank;
      }
      if (view.pages > 0) expect_pages(view, h);
      if (view.buckets > 0) expect_buckets(view, h);
    }
  }
}

TEST_P(Builds, AreTheSameBytesForAnyThreadsAndFoundAgain) {
  ASSERT_TRUE(build(options_).ok());
  const std::string bytes = testing::read_file(path_);
  BuildOptions other = options_;
  other.threads = 5;
  ASSERT_TRUE(build(other).ok());
  EXPECT_TRUE(testing::read_file(path_) == bytes);
  const auto find = [&](const BuildOptions& options) {
    return prepare(options).value()->find(Env::posix(), path_);
  };
  const auto found = must(find(other));
  EXPECT_EQ(found.bytes, bytes.size());
  QmodelFile classifier = qmodel();
  classifier.layers[2].centroids[0] += 0.5f;
  const std::pair<const char*, std::function<void(BuildOptions&)>> changes[] = {
      {"sink", [](BuildOptions& o) { o.sink = 5; }},
      {"build.pass", [](BuildOptions& o) { o.pass = "bf16, cuda"; }},
      {"build.seed", [](BuildOptions& o) { o.seed = 3; }},
      {"build.query_classifier", [&](BuildOptions& o) { o.qmodel = &classifier; }}};
  for (const auto& [field, change] : changes) {
    if (field == std::string("build.seed") && options_.partition != Partition::kKmeans) continue;
    if (field == std::string("build.query_classifier") && options_.qmodel == nullptr) continue;
    other = options_;
    change(other);
    const Status status = find(other).status();
    EXPECT_EQ(status.code(), Code::kMismatch);
    EXPECT_THAT(status.message(), HasSubstr(concat(path_, ": ", field, ": found ")));
  }
  std::filesystem::remove(path_);
  EXPECT_EQ(find(options_).status().code(), Code::kNotFound);
}

TEST_F(BuilderTest, OnlySlidingWindowsNeedNoQueriesAndNoLength) {
  model_.sliding_window.assign(kLayers, 64);
  auto builder =
      must(IndexBuilder::create(Env::posix(), path_, false, model_, make_tokens(3), "", options_));
  const std::vector<float> data(kHeads * 3 * kDim, 1.0f);
  for (int64_t l = 0; l < kLayers; ++l) {
    ASSERT_TRUE(builder->add_layer(l, {data, data, {}}).ok());
  }
  ASSERT_TRUE(builder->finish().ok());
  EXPECT_EQ(SqzFile::open(path_).value()->layer(2).exact, 3);
}

TEST_F(BuilderTest, BadNumbersNameLayerHeadAndToken) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  BuildOptions hitters = options_, half = options_;
  hitters.heavy_hitters = true;
  half.dtype = DType::kF16;
  const struct {
    std::vector<float> Layer::*member;
    int64_t at;
    float value;
    const BuildOptions& options;
    const char* says;
  } cases[] = {
      {&Layer::keys, (kTokens + 42) * kDim + 3, nan, options_, "KV head 1, token 42: key"},
      {&Layer::values, 499 * kDim, -infinity, options_, "KV head 0, token 499: value"},
      {&Layer::queries, (3 * kTail + 7) * kDim, infinity, options_, "query head 3, token 7: query"},
      {&Layer::attention, kTokens + 17, nan, hitters, "KV head 1, token 17: attention"},
      {&Layer::keys, 0, 70000.0f, half, "F16"}};  // finite, beyond float16
  for (const auto& [member, at, value, options, says] : cases) {
    Layer layer = make_layer(0);
    (layer.*member)[static_cast<size_t>(at)] = value;
    const Status status = add_first(layer, options);
    EXPECT_EQ(status.code(), Code::kNumeric);
    EXPECT_THAT(status.message(), HasSubstr("layer 0"));
    EXPECT_THAT(status.message(), HasSubstr(says));
    EXPECT_THAT(dir_.names(), IsEmpty());
  }
  Layer large = make_layer(0);
  large.keys[0] = 70000.0f;
  EXPECT_TRUE(add_first(large, options_).ok());
}

TEST_F(BuilderTest, TooShortTextSaysHowMuchIsNeeded) {
  const auto prepared = [&](int64_t tokens) {
    return IndexBuilder::prepare(model_, make_tokens(tokens), "", options_);
  };
  for (const int64_t tokens : {1, 24, 25}) {
    EXPECT_EQ(prepared(tokens).status().code(), Code::kInvalidArgument);
    EXPECT_THAT(prepared(tokens).status().message(), HasSubstr("at least 26"));
  }
  EXPECT_FALSE(prepared(0).ok());
  auto builder = *prepared(26);
  ASSERT_TRUE(builder->begin(Env::posix(), path_, false).ok());
  for (int64_t l = 0; l < kLayers; ++l) {
    ASSERT_TRUE(builder->add_layer(l, make_layer(l, 26).input()).ok());
  }
  ASSERT_TRUE(builder->finish().ok());
  EXPECT_EQ(SqzFile::open(path_).value()->verify().message(), "");
}

TEST_F(BuilderTest, OptionsAreChecked) {
  const QmodelFile& q = qmodel();
  const std::pair<const char*, std::function<void(BuildOptions&)>> cases[] = {
      {"levels", [](BuildOptions& o) { o.level_fractions = {}; }},
      {"levels",
       [](BuildOptions& o) {
         o.level_fractions = {.01, .02, .03, .04, .05};
       }},
      {"clusters per token",
       [](BuildOptions& o) {
         o.level_fractions = {0.05, 0.01};
       }},
      {"clusters per token", [](BuildOptions& o) { o.level_fractions = {1.5}; }},
      {"clusters per token", [](BuildOptions& o) { o.level_fractions = {std::nan("")}; }},
      {"engine", [](BuildOptions& o) { o.engine = "abacus"; }},
      {"query classifier: found none", [](BuildOptions& o) { o.partition = Partition::kBuckets; }},
      {"query classifier: found one", [&](BuildOptions& o) { o.qmodel = &q; }}};
  for (const auto& [field, change] : cases) {
    BuildOptions options = options_;
    change(options);
    const Status status = prepare(options).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << field;
    EXPECT_THAT(status.message(), HasSubstr(field));
  }
  BuildOptions buckets = options_;
  buckets.partition = Partition::kBuckets;
  buckets.qmodel = &q;
  model_.weights_hash = "0000000000000009";
  EXPECT_EQ(prepare(buckets).status().code(), Code::kMismatch);
}

TEST_F(BuilderTest, LayersComeInOrderAndComplete) {
  const Layer layer = make_layer(0);
  const auto fresh = [&] {
    auto builder = prepare(options_).value();
    EXPECT_TRUE(builder->begin(Env::posix(), path_, true).ok());
    return builder;
  };
  EXPECT_FALSE(prepare(options_).value()->add_layer(0, layer.input()).ok()) << "was not begun";
  EXPECT_EQ(fresh()->add_layer(1, layer.input()).code(), Code::kInvalidArgument);
  EXPECT_EQ(fresh()->finish().status().code(), Code::kInvalidArgument);
  for (auto member : {&Layer::keys, &Layer::values, &Layer::queries}) {
    Layer cut = layer;
    (cut.*member).pop_back();
    EXPECT_EQ(fresh()->add_layer(0, cut.input()).code(), Code::kInvalidArgument);
  }
  const DeviceRows rows;
  LayerInput on_device = layer.input();
  on_device.device = &rows;
  EXPECT_EQ(fresh()->add_layer(0, on_device).code(), Code::kInvalidArgument) << "faiss has none";
  auto builder = fresh();
  ASSERT_TRUE(builder->add_layer(0, layer.input()).ok());
  ASSERT_TRUE(builder->add_layer(1, make_layer(1).input()).ok());
  EXPECT_EQ(builder->add_layer(2, make_layer(2, kTokens, 19).input()).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(builder->add_layer(2, make_layer(2).input()).code(), Code::kInvalidArgument)
      << "a failed build goes on";
  builder.reset();
  EXPECT_THAT(dir_.names(), IsEmpty());
}

TEST_F(BuilderTest, FailingDiskLeavesNothing) {
  testing::FailNth none;
  testing::FaultEnv counting(none.hook());
  ASSERT_TRUE(build(options_, counting).ok());
  ASSERT_GT(none.calls.size(), 10u);
  for (size_t n = 0; n < none.calls.size(); ++n) {
    std::filesystem::remove(path_);
    testing::FailNth fail;
    fail.fail_at = static_cast<int>(n);
    testing::FaultEnv env(fail.hook());
    EXPECT_EQ(build(options_, env).status().code(), Code::kIo) << none.calls[n];
    const bool published = testing::is_after_publishing(none.calls[n]);
    EXPECT_EQ(dir_.names().size(), published ? 1u : 0u) << none.calls[n];
    if (published) {
      EXPECT_TRUE(SqzFile::open(path_).ok());
    }
  }
}

}  // namespace
}  // namespace sqz
