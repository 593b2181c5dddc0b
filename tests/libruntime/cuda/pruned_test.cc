// Pruned indexes on a GPU: what they left out is not there, and their policy reads as on the CPU.
#include "libindex/prune.h"
#include "libruntime/cuda/device_index.h"
#include "tests/libruntime/cuda/blocks.h"

namespace sqz::cuda {
namespace {

using test::DeviceCall;

class PrunedOnGpu : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }

  // The keys of an index like `whole` that the policy reads.
  static testing::Served prune(const testing::Served& whole, const SelectionRequest& policy) {
    const testing::TemporaryDirectory directory;
    const std::string path = directory.file("pruned.sqz");
    const auto report = prune_index(Env::posix(), whole.index->file, policy, path, false, 1);
    EXPECT_TRUE(report.ok()) << report.status().message();
    const auto file = SqzFile::open(path, OpenMode::kRead);
    EXPECT_TRUE(file.ok()) << file.status().message();
    const auto index = make_served_index(*file);
    EXPECT_TRUE(index.ok()) << index.status().message();
    return {whole.options, *index};
  }
};

TEST_F(PrunedOnGpu, ServesItsPolicyAsOnTheCpu) {
  const std::vector<double> scales = {1, 3};
  for (const auto selector : {SelectorKind::kStream, SelectorKind::kWindow, SelectorKind::kH2o}) {
    SCOPED_TRACE(static_cast<int>(selector));
    testing::TinyIndexOptions o = test::shape(128, 4, {40, 211});
    o.heavy_hitters = true;
    const testing::Served whole = testing::serve(o);
    SelectionRequest policy;
    policy.selector = selector;
    policy.budget = 0.2;
    policy.layer_scales = scales;
    const testing::Served pruned = prune(whole, policy);

    SelectionRequest alone;
    alone.selector = selector;
    alone.budget = 0.2;
    EXPECT_NEAR(test::compare_blocks(pruned, alone, {1, 1, 1}, {}), 0.18, 0.01);
    EXPECT_NEAR(test::compare_blocks(pruned, alone, {130, 7}, {}), 0.18, 0.01);

    // The whole index with that policy gives the same.
    const auto before = test::gpu_session(whole, policy), after = test::gpu_session(pruned, alone);
    ASSERT_TRUE(before && after);
    for (int64_t layer = 0; layer < o.layers; ++layer) {
      const std::vector<float> queries = testing::make_queries(whole, layer, 1, 3);
      DeviceCall a(whole, layer, 1, DType::kBF16), b(pruned, layer, 1, DType::kBF16);
      a.set_queries(queries);
      b.set_queries(queries);
      ASSERT_TRUE(before->attend(a.call).ok());
      ASSERT_TRUE(after->attend(b.call).ok());
      test::expect_rows_close(b.output(), a.output(), o.head_dim);
    }
  }
}

TEST_F(PrunedOnGpu, TakesTheMemoryOfTheBudget) {
  testing::TinyIndexOptions o = test::shape(128, 4, {40, 211});
  o.tokens = 40000;
  const testing::Served whole = testing::serve(o);
  SelectionRequest policy;
  policy.selector = SelectorKind::kStream;
  policy.budget = 0.1;
  const testing::Served pruned = prune(whole, policy);
  const size_t all = test::uploaded(whole)->bytes();
  EXPECT_GT(all, size_t{100} << 20);
  EXPECT_LT(test::uploaded(pruned)->bytes(), all / 9);
}

}  // namespace
}  // namespace sqz::cuda
