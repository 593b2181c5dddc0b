// Requests of several tokens by the selector saap on the GPU, against the CPU backend.
#include "libruntime/kernels/cuda/block_classify/kernel.h"
#include "tests/libruntime/cuda/buckets.h"
#include "tests/libruntime/cuda/graph.h"

namespace sqz::cuda {
namespace {

using test::BucketCalls;
using test::BucketQueries;
using test::Given;
using testing::Output;
using testing::Served;

struct How {
  int64_t block = 0;
  DType dtype = DType::kBF16;
  Given given = Given::kBefore;
  float drift = 0;
};

SessionOptions session_options(double share, int64_t block) {
  SessionOptions options;
  options.selection = test::keep_buckets(share);
  options.block = block;
  options.threads = 2;
  return options;
}

// Both backends with the same queries. Returns the share of the clustered keys that were read.
double compare(const Served& served, double share, const std::vector<int64_t>& lengths,
               const How& how) {
  const SessionOptions options = session_options(share, how.block);
  const auto gpu = create_session(served.index, test::uploaded(served), options);
  const auto cpu = Session::create(served.index, options);
  EXPECT_TRUE(gpu.ok()) << gpu.status().message();
  EXPECT_TRUE(cpu.ok()) << cpu.status().message();
  if (!gpu.ok() || !cpu.ok()) return 0;
  BucketCalls calls(served, lengths, how.dtype, how.given);
  calls.set(test::bucket_queries(served, calls.gpu().tokens, 7, how.drift));
  const Status status = (*gpu)->attend(calls.gpu());
  EXPECT_TRUE(status.ok()) << status.message();
  const Output expected = calls.expected(**cpu);
  if (how.dtype == DType::kF32) {
    test::expect_close(calls.output(), expected, served.options.head_dim);
  } else {
    test::expect_rows_close(calls.output(), expected, served.options.head_dim);
  }
  const auto found = (*gpu)->totals(1);
  EXPECT_TRUE(found.ok());
  test::expect_same_counters(*found, (*cpu)->counters(1));
  EXPECT_TRUE(
      test::same_runs(test::runs_of(**gpu, calls.gpu()), test::runs_of(**cpu, calls.cpu())));
  return static_cast<double>(found->keys_read) / static_cast<double>(found->keys_possible);
}

class SaapPrompts : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

TEST_F(SaapPrompts, ShapesAndGroups) {
  for (const int64_t dim : {64, 96, 128, 256}) {
    for (const int64_t group : {1, 2, 4, 7, 8}) {
      SCOPED_TRACE(concat("dim ", dim, ", group ", group));
      const Served served = test::serve_network({.dim = dim, .group = group});
      EXPECT_NEAR(compare(served, 0.2, {70}, {.block = 32}), 0.2, 0.03);
      compare(served, 0.2, {37}, {.block = 16, .dtype = DType::kF32});
      compare(served, 0.1, {9}, {.dtype = DType::kF16, .given = Given::kPositions});
      compare(served, 0.4, {21}, {.dtype = DType::kF32, .given = Given::kPositions});
      if (HasFailure()) return;
    }
  }
}

TEST_F(SaapPrompts, NetworksOfAnySize) {
  for (const auto& [buckets, hidden] : test::kNetworkSizes) {
    SCOPED_TRACE(concat(buckets, " buckets, ", hidden, " hidden units"));
    const Served served = test::serve_network(
        {.dim = 128, .group = 4, .heads = 2, .buckets = buckets, .hidden = hidden});
    compare(served, 0.3, {40}, {.dtype = DType::kF32});
    compare(served, 0.3, {5, 1, 20}, {.block = 8, .dtype = DType::kF32});
    if (HasFailure()) return;
  }
}

// Blocks that requests end within, single tokens among prompts, and blocks longer than a prompt.
TEST_F(SaapPrompts, RaggedRequests) {
  const Served served = test::serve_network({.dim = 64, .group = 2, .heads = 2});
  for (const Given given : {Given::kBefore, Given::kPositions}) {
    compare(served, 0.1, {1, 40, 33, 0, 1, 64, 5}, {.block = 32, .given = given});
    compare(served, 0.1, {7, 1, 100}, {.given = given});
    compare(served, 0.1, {40, 1}, {.block = 1000, .given = given});
    compare(served, 0.1, std::vector<int64_t>(300, 2), {.block = 2, .given = given});
  }
}

// More tokens than go through the networks at once: blocks that lie in several stretches.
TEST_F(SaapPrompts, BlocksOfSeveralStretches) {
  const Served served = test::serve_network({.dim = 64, .group = 2, .heads = 1});
  ASSERT_GT(1100, 2 * kClassifyTokens);
  for (const int64_t block : {0, 300, 512}) {
    SCOPED_TRACE(concat("blocks of ", block));
    How how = {.block = block, .dtype = DType::kF32, .drift = 1};
    compare(served, 0.1, {1100}, how);
    how.given = Given::kPositions;
    compare(served, 0.1, {500, 700, 1}, how);
  }
}

// Few queries a block and many buckets: what rounding queries and hidden units takes away is seen.
TEST_F(SaapPrompts, PrecisionOfQueries) {
  const Served served =
      test::serve_network({.dim = 64, .group = 1, .heads = 1, .buckets = 1024, .hidden = 256});
  compare(served, 0.1, std::vector<int64_t>(250, 2), {.dtype = DType::kF32});
}

TEST_F(SaapPrompts, EmptyBucketsEverythingAndNothing) {
  const Served sparse =
      test::serve_network({.dim = 64, .group = 2, .buckets = 201, .hidden = 20, .empty = 90});
  for (const double share : {1e-5, 0.01, 0.3, 0.9999}) {
    SCOPED_TRACE(share);
    EXPECT_NEAR(compare(sparse, share, {30, 2}, {.block = 16, .dtype = DType::kF32}), share, 0.03);
  }
}

TEST_F(SaapPrompts, GraphReplayWithOtherQueries) {
  const Served served = test::serve_network(test::NetworkShape());
  const SessionOptions options = session_options(0.2, 16);
  const auto gpu = create_session(served.index, test::uploaded(served), options);
  const auto cpu = Session::create(served.index, options);
  ASSERT_TRUE(gpu.ok() && cpu.ok());
  BucketCalls calls(served, {40, 1}, DType::kBF16, Given::kPositions);
  calls.set(test::bucket_queries(served, 41, 1));
  // Twice: the second must not disturb the first.
  const test::CapturedCall captured(**gpu, calls.gpu(), 2);
  for (const uint64_t seed : {2, 3}) {
    calls.set(test::bucket_queries(served, 41, seed), captured.stream());
    captured.replay();
    test::expect_rows_close(calls.output(), calls.expected(**cpu), 128);
  }
  EXPECT_EQ((*gpu)->totals(1)->selections, 2u * 2 * 4);
  const Output first = calls.output();
  for (int i = 0; i < 10; ++i) {
    captured.replay();
    ASSERT_EQ(calls.output(), first) << "the same bits again";
  }
}

TEST_F(SaapPrompts, NanStaysInItsBlockAndGroup) {
  const Served served = test::serve_network(test::NetworkShape());
  const auto gpu = create_session(served.index, test::uploaded(served), session_options(0.2, 16));
  ASSERT_TRUE(gpu.ok());
  BucketCalls calls(served, std::vector<int64_t>{32}, DType::kF32, Given::kBefore);
  BucketQueries q = test::bucket_queries(served, 32, 5);
  calls.set(q);
  ASSERT_TRUE((*gpu)->attend(calls.gpu()).ok());
  const Output clean = calls.output();
  // Token 18, head 5: the second block, KV head 1.
  const auto heads = static_cast<size_t>(served.options.query_heads);
  q.before[(18 * heads + 5) * 128 + 17] = NAN;
  calls.set(q);
  ASSERT_TRUE((*gpu)->attend(calls.gpu()).ok());
  const Output found = calls.output();
  for (size_t row = 0; row < 32 * heads; ++row) {
    if (row / heads >= 16 && row % heads / 4 == 1) {
      ASSERT_TRUE(std::isnan(found.lse[row])) << row;
    } else {
      ASSERT_EQ(found.lse[row], clean.lse[row]) << row;
    }
  }
  q.before[0] = INFINITY;
  calls.set(q);
  EXPECT_EQ((*gpu)->select(calls.gpu()).status().code(), Code::kNumeric);
}

}  // namespace
}  // namespace sqz::cuda
