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
  SessionOptions options;
  options.block = 32;
  options.threads = 2;
  for (const SelectionRequest& selection :
       {test::with_thresholds({even}), test::with_thresholds({even / 2, even}),
        test::by_budget(0.1, 1), test::by_budget(0.1)}) {
    options.selection = selection;
    const auto gpu = create_session(served.index, test::uploaded(served), options);
    const auto cpu = Session::create(served.index, options);
    ASSERT_TRUE(gpu.ok()) << gpu.status().message();
    ASSERT_TRUE(cpu.ok()) << cpu.status().message();
    for (const std::vector<int64_t>& indptr :
         {std::vector<int64_t>{0, 1}, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 70}}) {
      SCOPED_TRACE(concat("levels ", selection.levels, ", keep ", selection.keep, ", ",
                          indptr.size() - 1, " requests"));
      const std::vector<float> queries = testing::make_queries(served, 0, indptr.back(), 7, 0.6f);
      test::DeviceCall call(served, 0, indptr.back(), DType::kBF16);
      call.set_queries(queries);
      call.call.indptr = indptr.data();
      call.call.requests = std::ssize(indptr) - 1;
      const Status status = (*gpu)->attend(call.call);
      ASSERT_TRUE(status.ok()) << status.message();
      const auto expected = testing::attend(
          **cpu, 0, queries, {.dtype = DType::kBF16, .positions = {}, .indptr = indptr});
      ASSERT_TRUE(expected.ok()) << expected.status().message();
      test::expect_rows_close(call.output(), *expected, o.head_dim);
    }
    // With so many clusters a few scores are as near to the cutoff as float32 rounds.
    const auto found = (*gpu)->totals(0);
    const Counters want = (*cpu)->counters(0);
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
