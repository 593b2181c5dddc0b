// Attention in cases that the property test cannot draw: every instruction set, more blocks than
// fit in the buffers, and numbers that are huge or not finite.
#include <gtest/gtest.h>

#include "libruntime/kernels/cpu/kernels.h"
#include "tests/common/must.h"
#include "tests/libruntime/coded_rows.h"
#include "tests/libruntime/selection.h"

namespace sqz {
namespace {

using testing::Served;

// Compares every set of kernels with the machine's best, which the property test compares with
// float64. Returns how many selections differ, because scores were too close.
int64_t compare_kernels(const Served& served, const SelectionRequest& request) {
  const testing::TinyIndexOptions& o = served.options;
  const std::vector<float> keys = testing::decode(served.index->layers[0]).keys;
  SessionOptions options = testing::session_options(request);
  options.threads = 1;
  const auto best = testing::open_session(served, options);
  int64_t different = 0;
  for (const auto& [tokens, dtype] :
       {std::pair{1, DType::kF32}, {2, DType::kF16}, {20, DType::kBF16}}) {
    std::vector<float> q = testing::Random(6).normals(tokens * o.query_heads * o.head_dim);
    for (size_t i = 0; i < q.size(); ++i) q[i] += keys[i];
    q = testing::rounded(dtype, q);
    const auto slots = testing::selected_slots(*best, 0, q);
    const auto expected = testing::attend(*best, 0, q, {.dtype = dtype});
    for (const CpuKernels* kernels : available_cpu_kernels()) {
      SCOPED_TRACE(concat(kernels->name, " selector ", static_cast<int>(request.selector),
                          " tokens ", tokens));
      options.kernels = kernels;
      const auto session = testing::open_session(served, options);
      if (testing::selected_slots(*session, 0, q) != slots) {
        ++different;
        continue;
      }
      const auto found = testing::attend(*session, 0, q, {.dtype = dtype});
      EXPECT_TRUE(expected.ok() && found.ok()) << found.status().message();
      const double tolerance = dtype == DType::kF32 ? 2e-4 : dtype == DType::kF16 ? 2e-3 : 1.6e-2;
      for (size_t i = 0; i < found->out.size(); ++i) {
        EXPECT_NEAR(found->out[i], expected->out[i], tolerance * (1 + std::abs(expected->out[i])));
      }
      for (size_t i = 0; i < found->lse.size(); ++i) {
        EXPECT_NEAR(found->lse[i], expected->lse[i], 1e-4);
      }
      if (::testing::Test::HasFailure()) return different;
    }
  }
  return different;
}

// The head sizes that kernels are specialised for, and others.
TEST(Attend, EveryInstructionSetGivesTheSame) {
  int64_t different = 0;
  for (const auto& [stored_as, dim] : {std::pair{DType::kBF16, 64},
                                       {DType::kBF16, 80},
                                       {DType::kBF16, 128},
                                       {DType::kF16, 256},
                                       {DType::kF16, 5}}) {
    const auto shape = testing::TinyIndexOptions{.layers = 1,
                                                 .query_heads = 8,
                                                 .kv_heads = 2,
                                                 .head_dim = dim,
                                                 .tokens = 300,
                                                 .clusters = {8, 40},
                                                 .dtype = stored_as};
    for (const RowKind rows : {RowKind::k16, RowKind::kQ8}) {
      const Served served = rows == RowKind::k16 ? testing::serve(shape)
                                                 : testing::serve_coded(shape, {.rows = rows});
      for (const SelectorKind selector : {SelectorKind::kDense, SelectorKind::kSqueezed}) {
        SelectionRequest request{.selector = selector, .rule = RuleKind::kBudget};
        request.keep = selector == SelectorKind::kDense ? 0 : 0.3;
        SCOPED_TRACE(concat("dim ", dim, " rows ", rows_name(rows)));
        different += compare_kernels(served, request);
        if (HasFailure()) return;
      }
    }
    auto paged = shape;
    paged.page_size = 16;
    const SelectionRequest quest{.selector = SelectorKind::kQuest, .keep = 0.3, .dense_layers = -1};
    different += compare_kernels(testing::serve(paged), quest);
  }
  EXPECT_LE(different, 4);
}

// More one-token blocks than a chunk holds give what each token gives alone.
TEST(Attend, ManyBlocksEqualSingleBlocks) {
  const Served served = testing::serve({.layers = 1,
                                        .query_heads = 8,
                                        .kv_heads = 8,
                                        .head_dim = 8,
                                        .tokens = 20000,
                                        .clusters = {16000}});
  const double threshold = 1e-4;
  SessionOptions options =
      testing::session_options({.rule = RuleKind::kThreshold, .thresholds = &threshold});
  options.block = 1;
  const auto session = testing::open_session(served, options);
  const int64_t tokens = 150;
  const auto queries = testing::make_queries(served, 0, tokens, 10, 3.0f);
  const auto together = must(testing::attend(*session, 0, queries));
  EXPECT_EQ(session->counters(0).selections, 150u);
  for (const int64_t t : {int64_t{0}, int64_t{60}, int64_t{61}, int64_t{149}}) {
    const std::vector<float> one(queries.begin() + t * 64, queries.begin() + (t + 1) * 64);
    const auto alone = testing::attend(*session, 0, one);
    for (int64_t i = 0; i < 64; ++i) {
      EXPECT_NEAR(together.out[t * 64 + i], alone->out[i], 1e-5) << "token " << t;
    }
  }
}

TEST(Attend, HugeLogitsAreNeitherNanNorNothing) {
  const testing::TinyIndexOptions shape{
      .layers = 1, .head_dim = 64, .tokens = 900, .clusters = {6, 60}};
  const Served served = testing::serve_coded(shape, {.rows = RowKind::kQ8});
  const auto session = testing::open_session(
      served, testing::session_options({.rule = RuleKind::kBudget, .keep = 0.3}));
  const auto layer = testing::decode(served.index->layers[0]);
  for (const int64_t tokens : {1, 20}) {
    // A key's own direction, so long that exp() of logits overflows, and of differences vanishes.
    std::vector<float> queries(static_cast<size_t>(tokens * 4 * 64));
    for (size_t i = 0; i < queries.size(); ++i) queries[i] = 3000 * layer.keys[i];
    const auto output = must(testing::attend(*session, 0, queries));
    EXPECT_GT(*std::max_element(output.lse.begin(), output.lse.end()), 1e4f);
    for (const float x : output.out) ASSERT_TRUE(std::isfinite(x));
    for (const float x : output.lse) ASSERT_TRUE(std::isfinite(x));
  }
  const double kept = static_cast<double>(session->counters(0).keys_read) /
                      static_cast<double>(session->counters(0).keys_possible);
  EXPECT_NEAR(kept, 0.3, 0.05) << "an underflow dropped keys";
}

TEST(Attend, ARequestThatIsNotFiniteIsNanAndTheOthersAreServed) {
  const Served served = testing::serve(
      {.layers = 2, .head_dim = 64, .tokens = 900, .clusters = {60}, .windows = {{1, 200}}});
  for (const double keep : {0.0, 0.3}) {
    SelectionRequest request{.rule = RuleKind::kBudget, .keep = keep};
    if (keep == 0) request.selector = SelectorKind::kDense;
    const auto session = testing::open_session(served, testing::session_options(request));
    const testing::CallOptions requests = {.indptr = {0, 1, 5, 5, 7}};
    const auto good = testing::make_queries(served, 0, 7, 14);
    const auto expected = testing::attend(*session, 0, good, requests);
    for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
      auto queries = good;
      queries[(4 * 4 + 3) * 64 + 17] = bad;
      const auto output = must(testing::attend(*session, 0, queries, requests));
      for (size_t row = 0; row < 28; ++row) {
        const bool lost = row >= 1 * 4 && row < 5 * 4;
        EXPECT_EQ(std::isnan(output.lse[row]), lost) << "row " << row;
        for (size_t i = row * 64; i < (row + 1) * 64; ++i) {
          ASSERT_EQ(std::isnan(output.out[i]), lost) << "row " << row;
          ASSERT_TRUE(lost || std::abs(output.out[i] - expected->out[i]) < 1e-5);
        }
      }
      EXPECT_EQ(session->select(testing::make_call(0, 7, queries.data(), requests)).status().code(),
                Code::kNumeric);
    }
    // A layer with a sliding window needs positions behind the context.
    const auto queries = testing::make_queries(served, 1, 1, 12);
    EXPECT_EQ(testing::attend(*session, 1, queries).status().code(), Code::kInvalidArgument);
    EXPECT_EQ(testing::attend(*session, 1, queries, {.positions = {899}}).status().code(),
              Code::kInvalidArgument);
  }
}

// All keys are 1 and all values alike, so that the state is known.
TEST(Attend, NumbersAtTheEndsOfTheirTypes) {
  constexpr int64_t kDim = 16, kTokens = 700;
  const Served served = testing::serve({.layers = 1,
                                        .query_heads = 2,
                                        .kv_heads = 1,
                                        .head_dim = kDim,
                                        .tokens = kTokens,
                                        .clusters = {40}});
  const auto filled = [](float x) {
    return testing::stored(DType::kBF16, std::vector<float>(kTokens * kDim, x));
  };
  const auto ones = filled(1), huge = filled(3e38f), large = filled(1e5f);
  const auto session_of = [&](const std::vector<std::byte>& values, SelectorKind selector) {
    ServedIndex index = *served.index;
    LayerView& view = index.layers[0];
    view.keys = view.exact_keys = view.level[0].centroids = ones.data();
    view.values = view.exact_values = values.data();
    SelectionRequest request{.selector = selector, .rule = RuleKind::kBudget};
    request.keep = selector == SelectorKind::kDense ? 0 : 0.3;
    return *Session::create(std::make_shared<const ServedIndex>(index),
                            testing::session_options(request));
  };
  for (const SelectorKind selector : {SelectorKind::kDense, SelectorKind::kSqueezed}) {
    const auto session = session_of(large, selector);
    for (const int64_t tokens : {1, 40}) {  // streamed, and in tiles
      SCOPED_TRACE(concat("selector ", static_cast<int>(selector), " tokens ", tokens));
      const auto at = [&](float x, DType dtype = DType::kF32) {
        const std::vector<float> queries(tokens * 2 * kDim, x);
        return testing::attend(*session, 0, queries, {.dtype = dtype});
      };
      // A product of -3.3e38 is the lowest logit but one, and counts.
      const auto low = must(at(-2.06e37f));
      EXPECT_NEAR(low.lse[0] / -8.24e37, 1, 1e-3);
      EXPECT_NEAR(low.out[0], 1e5, 400);
      // What float32 cannot hold is refused, above as below.
      for (const float x : {-3e37f, 3e37f}) EXPECT_EQ(at(x).status().code(), Code::kNumeric) << x;
      // Half floats end at 65504.
      EXPECT_EQ(at(0, DType::kF16)->out[0], 65504);
    }
  }
  const auto session = session_of(huge, SelectorKind::kDense);
  for (const int64_t tokens : {1, 40}) {
    const std::vector<float> zeros(tokens * 2 * kDim);
    EXPECT_EQ(testing::attend(*session, 0, zeros).status().code(), Code::kNumeric);
  }
}

}  // namespace
}  // namespace sqz
