// Contexts of 128K and 512K tokens with a centroid for every 20 keys, against the CPU backend: what
// a lookup keeps of them in shared memory decides which kernels serve.
#include "tests/libruntime/cuda/blocks.h"

namespace sqz::cuda {
namespace {

class LongContext : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

TEST_P(LongContext, TokensAndPrompts) {
  const int64_t tokens = GetParam();
  testing::TinyIndexOptions o = test::shape(128, 4, {tokens / 100, tokens / 20});
  o.layers = o.kv_heads = 1;
  o.query_heads = 4;
  o.tokens = tokens;
  const testing::Served served = testing::serve(o);
  const double even = 1 / static_cast<double>(tokens);
  for (const SelectionRequest& selection :
       {test::with_thresholds({even}), test::with_thresholds({even / 2, even}),
        test::by_budget(0.1, 1), test::by_budget(0.1)}) {
    const test::Backends both(served, selection, 32);
    ASSERT_TRUE(bool{both});
    for (const test::Lengths& lengths : {test::Lengths{1}, test::single_tokens(7), {70}}) {
      SCOPED_TRACE(concat("levels ", selection.levels, ", keep ", selection.keep, ", ",
                          lengths.size(), " requests"));
      test::DeviceCall call(served, 0, lengths, DType::kBF16);
      const auto queries = testing::make_queries(served, 0, call.call.tokens, 7, 0.6f);
      call.set_queries(queries);
      const Status status = both.gpu->attend(call.call);
      ASSERT_TRUE(status.ok()) << status.message();
      const auto expected = testing::attend(*both.cpu, 0, queries, call.options());
      ASSERT_TRUE(expected.ok()) << expected.status().message();
      test::expect_rows_close(call.output(), *expected, o.head_dim);
    }
    // With so many clusters a few scores are as near to the cutoff as float32 rounds.
    const auto found = both.gpu->totals(0);
    const Counters want = both.cpu->counters(0);
    ASSERT_TRUE(found.ok());
    EXPECT_EQ(found->selections, want.selections);
    const auto read = static_cast<double>(want.keys_read);
    EXPECT_NEAR(static_cast<double>(found->keys_read), read, 1e-3 * read);
    EXPECT_GT(read, 0.005 * static_cast<double>(want.keys_possible));
    EXPECT_LT(read, 0.9 * static_cast<double>(want.keys_possible));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, LongContext, ::testing::Values(131072, 524288));

}  // namespace
}  // namespace sqz::cuda
