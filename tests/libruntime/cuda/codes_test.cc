// Indexes with rows of codes on the GPU, against the CPU backend.
#include <gmock/gmock.h>

#include "tests/libruntime/coded_rows.h"
#include "tests/libruntime/cuda/blocks.h"

namespace sqz::cuda {
namespace {

using test::by_budget;
using test::DeviceCall;
using test::gpu_session;
using test::shape;
using test::with_thresholds;
using testing::serve;
using testing::serve_coded;
using testing::Served;
using testing::TinyIndexOptions;

// The same index before and after it was compressed. Queries look for keys of the first.
struct Compressed {
  Served whole, coded;
};
Compressed compress(const TinyIndexOptions& options, const std::vector<int64_t>& layers16 = {}) {
  return {serve(options), serve_coded(options, {.rows = RowKind::kQ8, .layers16 = layers16})};
}

struct Call {
  std::vector<int64_t> lengths = {1};  // of its requests
  DType dtype = DType::kF32;
  int64_t block = 0;
  bool sm80 = false;
  double lse_slack = 0, rounding = 1;
};

// Both backends; the share of the keys that was read, which must be about the one asked for.
double compare(const Compressed& index, const SelectionRequest& selection, const Call& how) {
  const double read = test::compare_blocks(index.coded, selection, how.lengths,
                                           {.block = how.block,
                                            .dtype = how.dtype,
                                            .sm80_kernels = how.sm80,
                                            .wanted = &index.whole,
                                            .plain_queries = true,
                                            .lse_slack = how.lse_slack,
                                            .rounding = how.rounding});
  if (selection.keep > 0) {
    EXPECT_NEAR(read, selection.keep, 0.05);
  }
  return read;
}

SelectionRequest dense() {
  SelectionRequest request;
  request.selector = SelectorKind::kDense;
  return request;
}

std::vector<int64_t> tokens(int64_t count) {
  return std::vector<int64_t>(static_cast<size_t>(count), 1);
}

class Codes : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

// ---- A token a request.

TEST_F(Codes, Rules) {
  const Compressed index = compress(shape(128, 4, {43}));
  compare(index, by_budget(0.1), {});
  compare(index, with_thresholds({1e-3}), {tokens(3)});
  compare(index, by_budget(0.1), {.lengths = tokens(9), .dtype = DType::kBF16, .rounding = 4});
  compare(index, dense(), {tokens(2)});
}

TEST_F(Codes, ShapesAndGroups) {
  for (const int64_t dim : {64, 96, 128, 256}) {
    for (const int64_t group : {1, 4, 7, 8}) {
      SCOPED_TRACE(concat("dim ", dim, ", group ", group));
      const Compressed index = compress(shape(dim, group, {40, 211}));
      compare(index, by_budget(0.05), {});
      compare(index, by_budget(0.2), {tokens(11)});
      compare(index, with_thresholds({1e-4, 3e-4}), {tokens(2)});
      if (HasFailure()) return;
    }
  }
}

TEST_F(Codes, Dtypes) {
  for (const DType stored : {DType::kBF16, DType::kF16}) {
    TinyIndexOptions options = shape(128, 4, {211});
    options.dtype = stored;
    const Compressed index = compress(options);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(concat(dtype_name(stored), " and queries ", dtype_name(dtype)));
      compare(index, by_budget(0.1), {tokens(3), dtype});
      // The requests share a reading, for which rows become 16 bits.
      const double rounding = dtype == stored && dtype == DType::kBF16 ? 4 : 1;
      compare(index, dense(), {.lengths = tokens(3), .dtype = dtype, .rounding = rounding});
    }
  }
}

// Requests that share what they read, for which rows become 16 bits.
TEST_F(Codes, ManyRequests) {
  for (const DType stored : {DType::kF16, DType::kBF16}) {
    for (const int64_t dim : {64, 96, 128, 256}) {
      TinyIndexOptions options = shape(dim, dim == 64 ? 7 : 4, {40, 211});
      options.dtype = stored;
      options.layers = 1;
      const Compressed index = compress(options);
      for (const int64_t requests : {2, 6, 16, 40, 70}) {
        SCOPED_TRACE(concat(dtype_name(stored), ", dim ", dim, ", ", requests, " requests"));
        const bool bf16 = stored == DType::kBF16;
        const Call call = {.lengths = tokens(requests),
                           .dtype = stored,
                           .lse_slack = bf16 ? 2e-3 : 0.0,
                           .rounding = bf16 ? 4.0 : 2.0};
        compare(index, dense(), call);
        compare(index, with_thresholds({1e-4, 3e-4}), call);
        compare(index, by_budget(0.1), call);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(Codes, Levels) {
  const Compressed index = compress(shape(64, 4, {9, 70, 500}));
  compare(index, with_thresholds({2e-4, 2e-4, 2e-4}), {});
  compare(index, with_thresholds({2e-4, 2e-4}), {tokens(3)});
  for (const double keep : {0.01, 0.05, 0.3}) {
    for (const int levels : {1, 2, 3}) compare(index, by_budget(keep, levels), {tokens(2)});
  }
}

// Layers of 16 bits and dense ones beside those of codes.
TEST_F(Codes, MixedLayers) {
  TinyIndexOptions options = shape(128, 4, {43});
  options.layers = 4;
  options.dense_layers = {1};
  const Compressed index = compress(options, {2});
  compare(index, by_budget(0.1), {tokens(2)});
  compare(index, dense(), {tokens(2)});
}

// All rows, against float64.
TEST_F(Codes, EverythingInFloat64) {
  const Compressed index = compress(shape(128, 4, {43}));
  const Served& served = index.coded;
  const auto gpu = gpu_session(served, dense());
  ASSERT_NE(gpu, nullptr);
  const auto queries = testing::make_queries(index.whole, 0, 2, 7, 0.6f);
  DeviceCall call(served, 0, 2, DType::kF32);
  call.set_queries(queries);
  ASSERT_TRUE(gpu->attend(call.call).ok());
  const testing::Output found = call.output();
  const testing::Decoded layer = testing::decode(served.index->layers[0]);
  const int64_t d = served.options.head_dim;
  reference::Selected all;
  all.slots.assign(static_cast<size_t>(layer.view.slots), true);
  for (int64_t row = 0; row < std::ssize(found.lse); ++row) {
    const int64_t head = row % served.options.query_heads / served.group();
    const auto expected =
        reference::attend(queries.data() + row * d, layer.view, head, served.scale(), all);
    EXPECT_NEAR(found.lse[static_cast<size_t>(row)], expected.lse, 1e-4) << "row " << row;
    for (int64_t c = 0; c < d; ++c) {
      EXPECT_NEAR(found.out[static_cast<size_t>(row * d + c)], expected.out[static_cast<size_t>(c)],
                  2e-4)
          << "row " << row;
    }
    if (HasFailure()) return;
  }
}

// Runs of any keys, not of whole clusters.
TEST_F(Codes, StaticSelectors) {
  TinyIndexOptions options = shape(128, 4, {40, 211});
  options.dtype = DType::kF16;
  options.heavy_hitters = true;
  const Compressed index = compress(options);
  for (const SelectorKind kind :
       {SelectorKind::kStream, SelectorKind::kWindow, SelectorKind::kH2o}) {
    SCOPED_TRACE(concat("selector ", static_cast<int>(kind)));
    SelectionRequest selection;
    selection.selector = kind;
    selection.keep = 0.1;
    compare(index, selection, {tokens(3)});
    for (const bool sm80 : {false, true}) {
      // A window of few keys: the rounding of one shows in the sum.
      compare(index, selection, {{70, 1, 33}, DType::kF16, 32, sm80, 5e-4});
    }
    if (HasFailure()) return;
  }
}

// ---- Prompts.

// They share a selection of clusters a block, as on the CPU.
TEST_F(Codes, Prompts) {
  for (const int64_t dim : {64, 96, 128, 256}) {
    TinyIndexOptions options = shape(dim, dim == 96 ? 7 : 4, {40, 211});
    options.dtype = DType::kF16;
    const Compressed index = compress(options);
    for (const bool sm80 : {false, true}) {
      SCOPED_TRACE(concat("dim ", dim, sm80 ? ", sm80" : ""));
      const auto run = [&](const SelectionRequest& selection, std::vector<int64_t> lengths) {
        return compare(index, selection, {std::move(lengths), DType::kF16, 32, sm80});
      };
      run(by_budget(0.1), {70});
      run(with_thresholds({1e-4, 3e-4}), {1, 40, 33, 0, 5});
      EXPECT_EQ(run(dense(), {50, 3}), 1.0);
      if (HasFailure()) return;
    }
  }
}

TEST_F(Codes, PromptsOverMixedLayers) {
  TinyIndexOptions options = shape(128, 4, {43});
  options.dtype = DType::kF16;
  options.layers = 4;
  options.dense_layers = {1};
  const Compressed index = compress(options, {2});
  compare(index, by_budget(0.1), {{50, 1, 20}, DType::kF16, 16});
}

// Blocks of one token.
TEST_F(Codes, PromptsOfSingleTokens) {
  TinyIndexOptions options = shape(128, 4, {40, 211});
  options.dtype = DType::kF16;
  const Compressed index = compress(options);
  for (const bool sm80 : {false, true}) {
    const Call call = {{70, 1, 33}, DType::kF16, 1, sm80};
    compare(index, by_budget(0.1), call);
    compare(index, with_thresholds({1e-4, 3e-4}), call);
  }
}

// ---- Sessions.

TEST_F(Codes, FaultsAreNan) {
  const Compressed index = compress(shape(64, 4, {43}));
  const auto gpu = gpu_session(index.coded, by_budget(0.1));
  ASSERT_NE(gpu, nullptr);
  auto queries = testing::make_queries(index.whole, 0, 1, 7, 0.6f);
  const int64_t d = 64, group = 4;
  queries[static_cast<size_t>(group * d + 5)] = NAN;  // of the second KV head
  DeviceCall call(index.coded, 0, 1, DType::kF32);
  call.set_queries(queries);
  ASSERT_TRUE(gpu->attend(call.call).ok());
  const testing::Output output = call.output();
  for (int64_t row = 0; row < 3 * group; ++row) {
    EXPECT_EQ(std::isnan(output.lse[static_cast<size_t>(row)]), row / group == 1) << row;
    EXPECT_EQ(std::isnan(output.out[static_cast<size_t>(row * d)]), row / group == 1) << row;
  }
  EXPECT_EQ(gpu->select(call.call).status().code(), Code::kNumeric);
}

}  // namespace
}  // namespace sqz::cuda
