// An index that keys were appended to beside the one that is built from all of them.
#include "libindex/append.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "libindex/buckets.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_qmodel.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/libindex/clustered_data.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTokens = 300, kDim = 8, kHeads = 2, kLayers = 3;

// Layer 0 is dense, layer 1 has buckets, layer 2 a sliding window.
QmodelFile make_qmodel() {
  testing::TinyQmodelOptions o;
  o.layers = kLayers;
  o.head_dim = kDim;
  o.buckets = 7;
  QmodelFile q = testing::tiny_qmodel(o);
  q.model.hidden_size = 32;
  q.model.vocab_size = 1000;
  q.model.max_positions = 4096;
  q.model.sliding_window[2] = 50;
  q.dense = {0, 2};
  q.layers[2] = {};
  return q;
}

std::vector<int32_t> token_ids(int64_t count) {
  std::vector<int32_t> out(static_cast<size_t>(count));
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<int32_t>(i * 37 % 1000);
  return out;
}

// Tokens first .. end - 1 of [Hkv, kTokens, d].
std::vector<float> part(const std::vector<float>& all, int64_t first, int64_t end) {
  std::vector<float> out;
  for (int64_t head = 0; head < kHeads; ++head) {
    const auto begin = all.begin() + head * kTokens * kDim;
    out.insert(out.end(), begin + first * kDim, begin + end * kDim);
  }
  return out;
}

class Append : public ::testing::Test {
 protected:
  void SetUp() override {
    for (uint64_t l = 0; l < kLayers; ++l) {
      keys_.push_back(test::clustered_points(kHeads * kTokens, kDim, 30, 0.5f, 2 * l));
      values_.push_back(test::clustered_points(kHeads * kTokens, kDim, 30, 0.5f, 2 * l + 1));
    }
    options_.sink = 2;
    options_.tail = 30;
    options_.threads = 2;
    options_.partition = Partition::kBuckets;
    options_.qmodel = &qmodel_;
  }
  Status build(const std::string& name, int64_t tokens) {
    const std::vector<int32_t> ids = token_ids(tokens);
    SQZ_ASSIGN_OR_RETURN(
        auto builder, IndexBuilder::create(Env::posix(), dir_.file(name), true, qmodel_.model, ids,
                                           "0123456789abcdef", options_));
    for (int64_t l = 0; l < kLayers; ++l) {
      const auto keys = part(keys_[l], 0, tokens), values = part(values_[l], 0, tokens);
      const std::vector<float> queries(static_cast<size_t>(4 * kDim), 1);
      const std::vector<float> attention(static_cast<size_t>(kHeads * tokens), 1);
      SQZ_RETURN_IF_ERROR(builder->add_layer(l, {keys, values, queries, nullptr, attention}));
    }
    return builder->finish().status();
  }
  Status append(const std::string& from, const std::string& to, int64_t known, int64_t tokens,
                const std::vector<int32_t>& ids) {
    SQZ_ASSIGN_OR_RETURN(auto index, SqzFile::open(dir_.file(from)));
    SQZ_ASSIGN_OR_RETURN(auto appender, IndexAppender::create(Env::posix(), std::move(index),
                                                              dir_.file(to), from == to, ids, 2));
    for (int64_t l = 0; l < kLayers; ++l) {
      SQZ_RETURN_IF_ERROR(
          appender->add_layer(l, part(keys_[l], known, tokens), part(values_[l], known, tokens)));
    }
    return appender->finish().status();
  }
  std::string bytes(const std::string& name) const { return testing::read_file(dir_.file(name)); }

  testing::TemporaryDirectory dir_;
  QmodelFile qmodel_ = make_qmodel();
  BuildOptions options_;
  std::vector<std::vector<float>> keys_, values_;  // [layers] of [Hkv, kTokens, d]
};

TEST_F(Append, GivesTheFileOfOneBuild) {
  LayerBudgets budgets;
  budgets.allocation = "groups";
  budgets.context = 200;
  budgets.uniform_budget = 50;
  budgets.budget = {60, 50, 40};
  budgets.cosine = {0.5, 0.6, 0.7};
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    options_.dtype = dtype;
    options_.layer_budgets = budgets;
    ASSERT_TRUE(build("whole", kTokens).ok());
    // 40 leaves fewer tokens than the window, 269 and 299 less than a tail to append.
    for (const int64_t known : {40, 101, 269, 299}) {
      ASSERT_TRUE(build("part", known).ok());
      const Status status = append("part", "appended", known, kTokens, token_ids(kTokens));
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(bytes("appended") == bytes("whole")) << known;
      std::filesystem::remove(dir_.file("appended"));
    }
    // Twice, and in place.
    ASSERT_TRUE(build("part", 60).ok());
    ASSERT_TRUE(append("part", "part", 60, 130, token_ids(130)).ok());
    ASSERT_TRUE(append("part", "part", 130, kTokens, token_ids(kTokens)).ok());
    EXPECT_TRUE(bytes("part") == bytes("whole"));
  }
}

TEST_F(Append, RefusesWhatIsNoLongerContext) {
  ASSERT_TRUE(build("x", 200).ok());
  const std::string before = bytes("x");
  const auto refused = [&](const std::vector<int32_t>& ids, Code code) {
    const Status status = append("x", "x", 200, std::ssize(ids), ids);
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_TRUE(bytes("x") == before);
    return status.message();
  };
  EXPECT_THAT(refused(token_ids(200), Code::kCorrupt),
              HasSubstr("all tokens: found 200, expected more than the 200 that it has"));
  std::vector<int32_t> others = token_ids(kTokens);
  others[199] ^= 1;
  EXPECT_THAT(refused(others, Code::kMismatch), HasSubstr("hash of the first 200 tokens"));
  keys_[1][(kHeads * kTokens - 1) * kDim] = std::nanf("");
  EXPECT_THAT(refused(token_ids(kTokens), Code::kNumeric), HasSubstr("layer 1, KV head 1"));
  const auto index = SqzFile::open(dir_.file("x"));
  const auto ids = token_ids(kTokens);
  const auto appender = IndexAppender::create(Env::posix(), *index, dir_.file("y"), false, ids, 1);
  ASSERT_TRUE(appender.ok()) << appender.status().message();
  EXPECT_THAT((*appender)->add_layer(0, keys_[0], values_[0]).message(),
              HasSubstr("layer 0: floats of keys: found 4800, expected 1600"));
  EXPECT_THAT((*appender)->add_layer(3, {}, {}).message(), HasSubstr("layer: found 3"));
  EXPECT_FALSE(std::filesystem::exists(dir_.file("y")));
}

TEST_F(Append, RefusesIndexesThatLackWhatItNeeds) {
  const auto refused = [&](const std::string& says) {
    ASSERT_TRUE(build("x", 200).ok());
    const Status status = append("x", "y", 200, kTokens, token_ids(kTokens));
    EXPECT_EQ(status.code(), Code::kUnsupported) << status.message();
    EXPECT_THAT(status.message(), HasSubstr(says));
  };
  options_.heavy_hitters = true;
  refused("contents: found heavy hitters");
  options_.heavy_hitters = false;
  options_.partition = Partition::kPages;
  options_.qmodel = nullptr;
  refused("partition: found pages, expected buckets");

  options_.partition = Partition::kBuckets;
  options_.qmodel = &qmodel_;
  ASSERT_TRUE(build("x", 200).ok());
  std::string damaged = bytes("x");
  damaged[damaged.size() / 2] = static_cast<char>(damaged[damaged.size() / 2] ^ 1);
  testing::write_file(dir_.file("x"), damaged);
  EXPECT_EQ(append("x", "y", 200, kTokens, token_ids(kTokens)).code(), Code::kCorrupt);
  EXPECT_FALSE(std::filesystem::exists(dir_.file("y")));
}

}  // namespace
}  // namespace sqz
