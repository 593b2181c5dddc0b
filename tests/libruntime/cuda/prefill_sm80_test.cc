// The kernels of GPUs before Hopper, which also serve queries that the Hopper kernels do not take,
// against the CPU backend.
#include "tests/libruntime/cuda/blocks.h"

namespace sqz::cuda {
namespace {

using test::by_budget;
using test::shape;
using test::with_thresholds;
using testing::make_queries;
using testing::serve;
using testing::Served;
using testing::TinyIndexOptions;

double compare(const Served& served, const SelectionRequest& selection,
               const std::vector<int64_t>& lengths, int64_t block, DType dtype = DType::kBF16) {
  return test::compare_blocks(served, selection, lengths,
                              {.block = block, .dtype = dtype, .sm80_kernels = true});
}

class PrefillSm80 : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

TEST_F(PrefillSm80, ShapesAndRules) {
  for (const int64_t dim : {64, 96, 128, 256}) {
    for (const int64_t group : {1, 2, 4, 7, 8}) {
      SCOPED_TRACE(concat("dim ", dim, ", group ", group));
      const Served served = serve(shape(dim, group, {40, 211}));
      const double flat = compare(served, with_thresholds({2e-4}), {70}, 32);
      EXPECT_GT(flat, 0.005);
      EXPECT_LT(flat, 0.9);
      compare(served, with_thresholds({1e-4, 3e-4}), {70}, 32, DType::kF32);
      compare(served, by_budget(0.1), {70}, 32);
      if (HasFailure()) return;
    }
  }
}

TEST_F(PrefillSm80, Types) {
  for (const DType stored : {DType::kBF16, DType::kF16}) {
    TinyIndexOptions o = shape(128, 4, {40, 211});
    o.dtype = stored;
    const Served served = serve(o);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(concat(dtype_name(stored), " and queries ", dtype_name(dtype)));
      compare(served, with_thresholds({1e-4, 3e-4}), {40}, 32, dtype);
    }
  }
}

// Requests that end within a block, and single tokens, whose thresholds and shares are others.
TEST_F(PrefillSm80, RaggedRequests) {
  const Served served = serve(shape(128, 4, {40, 211}));
  compare(served, by_budget(0.1), {1, 40, 33, 0, 1, 64, 5}, 32);
  compare(served, with_thresholds({1e-4, 3e-4}), {7, 1, 100}, 0);
  // More blocks than one part of a table holds.
  compare(served, by_budget(0.05), std::vector<int64_t>(300, 2), 2);
}

TEST_F(PrefillSm80, LevelsAndRules) {
  const Served served = serve(shape(64, 4, {9, 70, 500}));
  compare(served, with_thresholds({2e-4, 2e-4, 2e-4}), {50}, 16);
  compare(served, by_budget(0.2), {50, 3}, 0);
  for (const double keep : {0.02, 0.1, 0.24}) {
    for (const int levels : {1, 2, 3}) compare(served, by_budget(keep, levels), {33}, 16);
  }
}

TEST_F(PrefillSm80, EverythingNothingAndOneCluster) {
  const Served served = serve(shape(128, 4, {40, 211}));
  EXPECT_EQ(compare(served, with_thresholds({0, 0}), {20}, 0), 1);
  EXPECT_EQ(compare(served, with_thresholds({1, 1}), {20}, 0), 0);
  compare(serve(shape(128, 4, {1})), with_thresholds({1e-4}), {20}, 0);
  TinyIndexOptions bare = shape(128, 4, {40, 211});
  bare.sink = bare.tail = 0;
  EXPECT_EQ(compare(serve(bare), with_thresholds({1, 1}), {20}, 0), 0);
}

// Few rows, whose keys are cut into parts, and so many that they are not.
TEST_F(PrefillSm80, Dense) {
  const Served served = serve(shape(64, 8, {40, 211}));
  SelectionRequest dense;
  dense.selector = SelectorKind::kDense;
  EXPECT_EQ(compare(served, dense, {50, 3}, 32), 1.0);
  EXPECT_EQ(compare(served, dense, {1800}, 0), 1.0);
  TinyIndexOptions o = shape(128, 4, {40, 211});
  o.dense_layers = {1};
  compare(serve(o), by_budget(0.1), {40}, 16);
}

TEST_F(PrefillSm80, SelectorsThatLookAtNoQuery) {
  TinyIndexOptions o = shape(128, 4, {40, 211});
  o.heavy_hitters = true;
  const Served served = serve(o);
  for (const SelectorKind kind :
       {SelectorKind::kStream, SelectorKind::kWindow, SelectorKind::kH2o}) {
    SCOPED_TRACE(concat("selector ", static_cast<int>(kind)));
    SelectionRequest request;
    request.selector = kind;
    request.keep = 0.1;
    EXPECT_NEAR(compare(served, request, {1, 40, 33, 0, 5}, 32), 0.1, 0.001);
  }
}

// Decoding without teams of blocks and launches that overlap.
TEST_F(PrefillSm80, SingleTokens) {
  const Served served = serve(shape(128, 4, {40, 211}));
  for (const int64_t requests : {1, 3, 20}) {
    const std::vector<int64_t> lengths(static_cast<size_t>(requests), 1);
    compare(served, with_thresholds({1e-4, 3e-4}), lengths, 0);
    compare(served, by_budget(0.1), lengths, 0);
    compare(served, {.selector = SelectorKind::kDense}, lengths, 0);
  }
}

// On any GPU: what the kernels of Hopper do not take.
TEST_F(PrefillSm80, QueriesOfAnotherType) {
  const Served served = serve(shape(128, 4, {40, 211}));
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    test::compare_blocks(served, by_budget(0.1), {40, 1, 3}, {.block = 16, .dtype = dtype});
  }
}

TEST_F(PrefillSm80, NanStaysInItsBlockAndGroup) {
  const Served served = serve(shape(128, 4, {40, 211}));
  for (const bool dense : {false, true}) {
    SessionOptions options;
    options.selection = with_thresholds({1e-4, 1e-4});
    if (dense) options.selection = {.selector = SelectorKind::kDense};
    options.block = 16;
    options.sm80_kernels = true;
    const auto gpu = create_session(served.index, test::uploaded(served), options);
    ASSERT_TRUE(gpu.ok()) << gpu.status().message();
    const std::vector<int64_t> indptr = {0, 32};
    std::vector<float> queries = make_queries(served, 0, 32, 5);
    test::DeviceCall call(served, 0, 32, DType::kBF16);
    call.call.indptr = indptr.data();
    call.call.requests = 1;
    call.set_queries(queries);
    ASSERT_TRUE((*gpu)->attend(call.call).ok());
    const auto clean = call.output();
    // Token 18, head 5: the second block, KV head 1.
    const auto dim = static_cast<size_t>(served.options.head_dim);
    const auto heads = static_cast<size_t>(served.options.query_heads);
    queries[(18 * heads + 5) * dim + 17] = NAN;
    call.set_queries(queries);
    ASSERT_TRUE((*gpu)->attend(call.call).ok());
    const auto found = call.output();
    EXPECT_TRUE(std::isnan(found.lse[18 * heads + 5]));
    EXPECT_TRUE(std::isnan(found.out[(18 * heads + 5) * dim]));
    for (size_t row = 0; row < 32 * heads; ++row) {
      const size_t token = row / heads, head = row % heads;
      if (dense ? row == 18 * heads + 5 : token >= 16 && head / 4 == 1) continue;
      ASSERT_EQ(found.lse[row], clean.lse[row]) << row;
      ASSERT_EQ(found.out[row * dim], clean.out[row * dim]) << row;
    }
    // Its block lost its selection, too.
    EXPECT_EQ(std::isnan(found.lse[16 * heads + 4]), !dense);
  }
}

}  // namespace
}  // namespace sqz::cuda
