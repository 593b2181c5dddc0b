// The order of heavy hitters that a build stores.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "libindex/builder.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_model.h"
#include "tests/libindex/clustered_data.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTokens = 300, kDim = 16, kHeads = 2, kTail = 20, kSink = 4;

ModelDescription model() {
  ModelDescription out = testing::tiny_model(2, 4, kHeads, kDim);
  out.sliding_window[1] = 30;
  return out;
}

BuildOptions options(Partition partition) {
  BuildOptions out;
  out.sink = kSink;
  out.tail = kTail;
  out.threads = 1;
  out.heavy_hitters = true;
  out.partition = partition;
  out.engine = "faiss";
  return out;
}

// Attention that many tokens share: ties go to the earlier one.
std::vector<float> attention() {
  std::vector<float> out;
  for (int64_t i = 0; i < kHeads * kTokens; ++i) out.push_back(static_cast<float>(i * 7919 % 40));
  return out;
}

Status build(const std::string& path, const BuildOptions& options,
             std::span<const float> attention) {
  const std::vector<int32_t> tokens(kTokens, 7);
  SQZ_ASSIGN_OR_RETURN(
      auto builder, IndexBuilder::create(Env::posix(), path, false, model(), tokens, "", options));
  const auto keys = test::clustered_points(kHeads * kTokens, kDim, 12, 0.5f, 1);
  const auto queries = test::clustered_points(4 * kTail, kDim, 12, 0.5f, 2);
  SQZ_RETURN_IF_ERROR(builder->add_layer(0, {keys, keys, queries, nullptr, attention}));
  SQZ_RETURN_IF_ERROR(builder->add_layer(1, {keys, keys, {}}));  // a window: dense
  return builder->finish().status();
}

TEST(HeavyHitters, AreOrderedByAttentionThenByToken) {
  for (const Partition partition : {Partition::kKmeans, Partition::kPages}) {
    const testing::TemporaryDirectory dir;
    const std::vector<float> got = attention();
    const Status built = build(dir.file("x"), options(partition), got);
    ASSERT_TRUE(built.ok()) << built.message();
    const auto file = SqzFile::open(dir.file("x")).value();
    EXPECT_THAT(file->verify()->problems, ::testing::IsEmpty());
    EXPECT_EQ(file->layer(1).heavy, nullptr);
    const LayerView view = file->layer(0);
    ASSERT_NE(view.heavy, nullptr);
    for (int64_t h = 0; h < kHeads; ++h) {
      const auto token = [&](int64_t rank) {
        return view.positions[h * view.slots + view.heavy[h * view.slots + rank]];
      };
      const auto mass = [&](uint32_t t) { return got[static_cast<size_t>(h * kTokens + t)]; };
      for (int64_t rank = 1; rank < view.slots; ++rank) {
        const uint32_t before = token(rank - 1), after = token(rank);
        ASSERT_TRUE(mass(before) > mass(after) || (mass(before) == mass(after) && before < after))
            << "head " << h << " rank " << rank;
      }
    }
  }
}

TEST(HeavyHitters, NeedTheAttentionOfEveryToken) {
  const testing::TemporaryDirectory dir;
  std::vector<float> got = attention();
  const auto refused = [&](std::span<const float> attention) {
    const Status status = build(dir.file("x"), options(Partition::kPages), attention);
    EXPECT_FALSE(Env::posix().exists(dir.file("x")));
    return status;
  };
  EXPECT_THAT(refused({}).message(), HasSubstr("elements of attention: found 0, expected 600"));
  EXPECT_EQ(refused(std::span(got).first(599)).code(), Code::kInvalidArgument);
  got[static_cast<size_t>(kTokens + 17)] = NAN;
  const Status nan = refused(got);
  EXPECT_EQ(nan.code(), Code::kNumeric);
  EXPECT_THAT(nan.message(), HasSubstr("attention to token 17, KV head 1"));
}

}  // namespace
}  // namespace sqz
