// Requests of several tokens by the selector quest on the GPU, against the CPU backend.
#include "tests/libruntime/cuda/blocks.h"
#include "tests/libruntime/cuda/graph.h"

namespace sqz::cuda {
namespace {

using testing::make_queries;
using testing::serve;
using testing::Served;
using testing::TinyIndexOptions;

TinyIndexOptions pages(int64_t dim, int64_t group, int64_t page_size = 16) {
  TinyIndexOptions o = test::shape(dim, group, {});
  o.page_size = page_size;
  return o;
}

SelectionRequest quest(double keep) {
  SelectionRequest request;
  request.selector = SelectorKind::kQuest;
  request.dense_layers = -1;
  request.keep = keep;
  return request;
}

double compare(const Served& served, const SelectionRequest& selection,
               const std::vector<int64_t>& lengths, int64_t block, DType dtype = DType::kBF16) {
  return test::compare_blocks(served, selection, lengths, {.block = block, .dtype = dtype});
}

class QuestPrompts : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

TEST_F(QuestPrompts, Shapes) {
  for (const int64_t dim : {64, 96, 128, 256}) {
    for (const int64_t group : {1, 4, 7, 8}) {
      const Served served = serve(pages(dim, group, group == 7 ? 9 : 16));
      SCOPED_TRACE(concat("dim ", dim, ", group ", group));
      EXPECT_NEAR(compare(served, quest(0.1), {70}, 32), 0.1, 0.005);
      compare(served, quest(0.05), {37}, 32, DType::kF32);
      if (HasFailure()) return;
    }
  }
}

TEST_F(QuestPrompts, Types) {
  for (const DType stored : {DType::kBF16, DType::kF16}) {
    TinyIndexOptions o = pages(128, 4);
    o.dtype = stored;
    const Served served = serve(o);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(concat(dtype_name(stored), ", queries ", dtype_name(dtype)));
      compare(served, quest(0.1), {40}, 32, dtype);
    }
  }
}

// Blocks that requests end within, single tokens among prompts, and blocks longer than a prompt.
TEST_F(QuestPrompts, RaggedRequests) {
  const Served served = serve(pages(128, 4));
  compare(served, quest(0.1), {1, 40, 33, 0, 1, 64, 5}, 32);
  compare(served, quest(0.1), {7, 1, 100}, 0);
  compare(served, quest(0.1), {40, 1}, 1000);
  compare(served, quest(0.05), std::vector<int64_t>(300, 2), 2);
}

TEST_F(QuestPrompts, OnePageNearlyAllAndFewPages) {
  const Served served = serve(pages(128, 4));
  const double slots = 4321 - 116;
  EXPECT_NEAR(compare(served, quest(16.5 / slots), {20}, 0), 16 / slots, 1e-4);
  EXPECT_GT(compare(served, quest(0.999), {20}, 0), 0.99);
  const Served few = serve(pages(64, 2, 1500));
  compare(few, quest(0.4), {20, 3}, 8);
}

TEST_F(QuestPrompts, DenseLayersAndLayerBudgets) {
  const Served served = serve(pages(128, 4));
  SelectionRequest request = quest(0.1);
  request.dense_layers = 1;
  compare(served, request, {40, 1}, 16);
  request.dense_layers = -1;
  const std::vector<double> scales = {0.5, 1.5};
  request.layer_scales = scales;
  compare(served, request, {40, 1}, 16);
}

// Other kernels for attention, the same for the lookup.
TEST_F(QuestPrompts, Sm80Kernels) {
  const Served served = serve(pages(128, 4));
  test::compare_blocks(served, quest(0.1), {40, 1, 3}, {.block = 16, .sm80_kernels = true});
}

TEST_F(QuestPrompts, GraphReplayWithOtherQueries) {
  const Served served = serve(pages(128, 4));
  SessionOptions options;
  options.selection = quest(0.1);
  options.block = 16;
  const auto gpu = create_session(served.index, test::uploaded(served), options);
  options.threads = 2;
  const auto cpu = Session::create(served.index, options);
  ASSERT_TRUE(gpu.ok() && cpu.ok());
  const std::vector<int64_t> indptr = {0, 40, 41};
  test::DeviceCall call(served, 1, 41, DType::kBF16);
  call.call.indptr = indptr.data();
  call.call.requests = 2;
  call.set_queries(make_queries(served, 1, 41, 1));
  // Twice: the second must not disturb the first.
  const test::CapturedCall captured(**gpu, call.call, 2);
  for (const uint64_t seed : {2, 3}) {
    const std::vector<float> queries = make_queries(served, 1, 41, seed);
    call.set_queries(queries, captured.stream());
    captured.replay();
    const auto expected = testing::attend(
        **cpu, 1, queries, {.dtype = DType::kBF16, .positions = {}, .indptr = indptr});
    ASSERT_TRUE(expected.ok());
    test::expect_rows_close(call.output(), *expected, 128);
  }
  EXPECT_EQ((*gpu)->totals(1)->selections, 2u * 2 * 4);
  const auto first = call.output();
  for (int i = 0; i < 10; ++i) {
    captured.replay();
    ASSERT_EQ(call.output(), first) << "the same bits again";
  }
}

TEST_F(QuestPrompts, NanStaysInItsBlockAndGroup) {
  const Served served = serve(pages(128, 4));
  SessionOptions options;
  options.selection = quest(0.1);
  options.block = 16;
  const auto gpu = create_session(served.index, test::uploaded(served), options);
  ASSERT_TRUE(gpu.ok()) << gpu.status().message();
  std::vector<float> queries = make_queries(served, 0, 32, 5);
  test::DeviceCall call(served, 0, 32, DType::kBF16);
  call.call.indptr = nullptr;
  call.call.requests = 0;
  call.set_queries(queries);
  ASSERT_TRUE((*gpu)->attend(call.call).ok());
  const auto clean = call.output();
  // Token 18, head 5: the second block, KV head 1.
  const auto heads = static_cast<size_t>(served.options.query_heads);
  queries[(18 * heads + 5) * 128 + 17] = NAN;
  call.set_queries(queries);
  ASSERT_TRUE((*gpu)->attend(call.call).ok());
  const auto found = call.output();
  for (size_t row = 0; row < 32 * heads; ++row) {
    if (row / heads >= 16 && row % heads / 4 == 1) {
      ASSERT_TRUE(std::isnan(found.lse[row])) << row;
    } else {
      ASSERT_EQ(found.lse[row], clean.lse[row]) << row;
    }
  }
  queries[5 * 128 + 17] = INFINITY;
  call.set_queries(queries);
  EXPECT_EQ((*gpu)->select(call.call).status().code(), Code::kNumeric);
}

}  // namespace
}  // namespace sqz::cuda
