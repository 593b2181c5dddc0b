// Indexes of buckets: every key in the bucket that is nearest before RoPE, and what the file holds.
#include "libindex/buckets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "formats/base/hash.h"
#include "libindex/builder.h"
#include "libruntime/rope.h"
#include "tests/common/same_qmodel.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_qmodel.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/libindex/clustered_data.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kTokens = 300, kDim = 8, kHeads = 2, kBuckets = 7, kSink = 2, kTail = 30;

QmodelFile make_qmodel() {
  testing::TinyQmodelOptions o;
  o.head_dim = kDim;
  o.buckets = kBuckets;
  QmodelFile q = testing::tiny_qmodel(o);
  q.model.hidden_size = 32;
  q.model.vocab_size = 1000;
  q.model.max_positions = 4096;
  return q;
}

struct Layer {
  std::vector<float> keys, values;
};
Layer make_layer(int64_t index) {
  const auto seed = static_cast<uint64_t>(index) * 10;
  return {test::clustered_points(kHeads * kTokens, kDim, 30, 0.5f, seed),
          test::clustered_points(kHeads * kTokens, kDim, 30, 0.5f, seed + 1)};
}

BuildOptions bucket_options(const QmodelFile& qmodel) {
  BuildOptions options;
  options.sink = kSink;
  options.tail = kTail;
  options.threads = 2;
  options.partition = Partition::kBuckets;
  options.qmodel = &qmodel;
  return options;
}

Result<BuildReport> build(const std::string& path, const ModelDescription& model,
                          const BuildOptions& options) {
  const std::vector<int32_t> tokens(kTokens, 7);
  SQZ_ASSIGN_OR_RETURN(auto builder,
                       IndexBuilder::create(Env::posix(), path, true, model, tokens, "", options));
  for (int64_t l = 0; l < 2; ++l) {
    const Layer layer = make_layer(l);
    SQZ_RETURN_IF_ERROR(builder->add_layer(l, {layer.keys, layer.values, {}, nullptr}));
  }
  return builder->finish();
}

// The bucket of a key as it is stored, in float64 and with the angles of the definition.
int64_t nearest(const QmodelFile& q, int64_t head, const float* key, int64_t position) {
  const auto frequencies = rope_frequencies(q.model.rope, kDim);
  std::vector<double> back(kDim);
  for (int64_t i = 0; i < kDim / 2; ++i) {
    const double angle = static_cast<double>(position) * double{frequencies[i]};
    const double a = to_float(to_bfloat16(key[i])), b = to_float(to_bfloat16(key[i + kDim / 2]));
    back[i] = a * std::cos(angle) + b * std::sin(angle);
    back[i + kDim / 2] = b * std::cos(angle) - a * std::sin(angle);
  }
  int64_t best = 0;
  double most = -INFINITY;
  for (int64_t b = 0; b < kBuckets; ++b) {
    double product = 0;
    for (int64_t c = 0; c < kDim; ++c) {
      product += back[c] * double{q.layers[1].centroids[(head * kBuckets + b) * kDim + c]};
    }
    if (product <= most) continue;
    most = product;
    best = b;
  }
  return best;
}

TEST(Buckets, TheClassifierOfAnIndexBuildsTheSameIndexAgain) {
  const testing::TemporaryDirectory dir;
  const QmodelFile q = make_qmodel();
  ASSERT_TRUE(build(dir.file("x"), q.model, bucket_options(q)).ok());
  const auto file = SqzFile::open(dir.file("x"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  const QmodelFile embedded = embedded_qmodel(**file);
  testing::expect_same_layers(embedded, q);
  EXPECT_EQ(embedded.dense, q.dense);
  EXPECT_EQ(embedded.recent, q.recent);
  const auto again = build(dir.file("y"), q.model, bucket_options(embedded));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(testing::read_file(dir.file("x")), testing::read_file(dir.file("y")));
}

TEST(Buckets, EveryKeyIsInTheNearestBucketOfTheClassifier) {
  const testing::TemporaryDirectory dir;
  const QmodelFile q = make_qmodel();
  const auto report = build(dir.file("x"), q.model, bucket_options(q));
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->engine, "none");
  EXPECT_EQ(report->clusters, std::vector<int64_t>{kBuckets});
  const auto plan = IndexBuilder::plan(q.model, kTokens, bucket_options(q));
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(report->bytes, plan->bytes);

  const auto file = SqzFile::open(dir.file("x"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_THAT((*file)->verify()->problems, IsEmpty());
  EXPECT_EQ((*file)->metadata().partition, Partition::kBuckets);
  EXPECT_EQ((*file)->layer(0).buckets, 0);
  EXPECT_EQ((*file)->layer(0).exact, kTokens) << "layer 0 is dense in the classifier";
  const LayerView view = (*file)->layer(1);
  ASSERT_EQ(view.buckets, kBuckets);
  ASSERT_EQ(view.slots, kTokens - kSink - kTail);
  const Layer layer = make_layer(1);
  for (int64_t head = 0; head < kHeads; ++head) {
    const uint32_t* offsets = view.bucket_offsets + head * (kBuckets + 1);
    for (int64_t b = 0; b < kBuckets; ++b) {
      for (uint32_t s = offsets[b]; s < offsets[b + 1]; ++s) {
        const int64_t slot = head * view.slots + s, token = view.positions[slot];
        const float* key = layer.keys.data() + (head * kTokens + token) * kDim;
        EXPECT_EQ(nearest(q, head, key, token), b) << "head " << head << " token " << token;
        if (s > offsets[b]) {
          EXPECT_GT(token, view.positions[slot - 1]) << "in token order";
        }
        const auto* stored = static_cast<const BFloat16*>(view.keys) + slot * kDim;
        EXPECT_EQ(to_float(stored[3]), to_float(to_bfloat16(key[3]))) << "keys are after RoPE";
      }
    }
    EXPECT_EQ(offsets[kBuckets], view.slots);
  }
  const auto same = [](const float* found, const std::vector<float>& wanted) {
    return std::equal(wanted.begin(), wanted.end(), found);
  };
  EXPECT_EQ(view.classifier.hidden, q.hidden);
  EXPECT_TRUE(same(view.classifier.centroids, q.layers[1].centroids));
  EXPECT_TRUE(same(view.classifier.hidden_weight, q.layers[1].hidden_weight));
  EXPECT_TRUE(same(view.classifier.hidden_bias, q.layers[1].hidden_bias));
  EXPECT_TRUE(same(view.classifier.output_weight, q.layers[1].output_weight));
  EXPECT_TRUE(same(view.classifier.output_bias, q.layers[1].output_bias));
}

TEST(Buckets, DoNotDependOnThreadsOrOnWhatComesAfter) {
  const testing::TemporaryDirectory dir;
  const QmodelFile q = make_qmodel();
  BuildOptions options = bucket_options(q);
  ASSERT_TRUE(build(dir.file("a"), q.model, options).ok());
  options.threads = 1;
  ASSERT_TRUE(build(dir.file("b"), q.model, options).ok());
  const auto a = SqzFile::open(dir.file("a")), b = SqzFile::open(dir.file("b"));
  EXPECT_EQ((*a)->raw_metadata(), (*b)->raw_metadata());

  const Layer layer = make_layer(1);
  const auto all = order_by_bucket(q, 1, {layer.keys, kTokens, kSink, 200, DType::kF16}, 1);
  const auto some = order_by_bucket(q, 1, {layer.keys, kTokens, kSink, 150, DType::kF16}, 1);
  ASSERT_TRUE(all.ok() && some.ok());
  for (int64_t head = 0; head < kHeads; ++head) {
    const auto& slots = all->heads[head].keys;
    std::vector<uint32_t> early;
    std::copy_if(slots.begin(), slots.end(), std::back_inserter(early),
                 [](uint32_t key) { return key < 150; });
    EXPECT_EQ(early, some->heads[head].keys);
  }
}

TEST(Buckets, RefusesWhatDoesNotFit) {
  const testing::TemporaryDirectory dir;
  const QmodelFile q = make_qmodel();
  ModelDescription other = q.model;
  other.weights_hash = hex(uint64_t{9});
  const auto refused = [&](const ModelDescription& model, const BuildOptions& options, Code code) {
    const Status status = build(dir.file("x"), model, options).status();
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
    return status.message();
  };
  EXPECT_THAT(refused(other, bucket_options(q), Code::kMismatch),
              HasSubstr("the query classifier"));
  BuildOptions none = bucket_options(q);
  none.qmodel = nullptr;
  EXPECT_THAT(refused(q.model, none, Code::kInvalidArgument),
              HasSubstr("query classifier: found none"));
  BuildOptions pages = bucket_options(q);
  pages.partition = Partition::kPages;
  EXPECT_THAT(refused(q.model, pages, Code::kInvalidArgument), HasSubstr("found pages"));
}

TEST(Buckets, DamageIsFoundByVerify) {
  const testing::TemporaryDirectory dir;
  const QmodelFile q = make_qmodel();
  ASSERT_TRUE(build(dir.file("x"), q.model, bucket_options(q)).ok());
  const auto file = SqzFile::open(dir.file("x"));
  for (const TensorInfo& tensor : (*file)->header().tensors) {
    if (!tensor.name.starts_with("layers.1.buckets.")) continue;
    std::filesystem::copy_file(dir.file("x"), dir.file("y"),
                               std::filesystem::copy_options::overwrite_existing);
    std::fstream out(dir.file("y"), std::ios::binary | std::ios::in | std::ios::out);
    out.seekp(static_cast<std::streamoff>(tensor.offset + 7));
    out.put('\x7f');
    out.close();
    const auto damaged = SqzFile::open(dir.file("y"));
    ASSERT_TRUE(damaged.ok());
    EXPECT_THAT((*damaged)->verify()->problems, ::testing::Contains(HasSubstr(tensor.name)));
  }
}

}  // namespace
}  // namespace sqz
