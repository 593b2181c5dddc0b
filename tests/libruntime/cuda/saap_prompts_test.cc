// Requests of several tokens by the selector saap on the GPU, against the CPU backend.
#include "libruntime/kernels/cuda/prefill/classify/kernel.h"
#include "tests/libruntime/cuda/bucket_backends.h"

namespace sqz::cuda {
namespace {

using test::BucketBackends;
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

// Returns the share of the clustered keys that were read.
double compare(const Served& served, double share, const std::vector<int64_t>& lengths,
               const How& how) {
  BucketCalls calls(served, lengths, how.dtype, how.given);
  const BucketQueries queries = test::bucket_queries(served, calls.gpu().tokens, 7, how.drift);
  return BucketBackends(served, share, how.block)
      .compare(calls, queries,
               how.dtype == DType::kF32 ? test::expect_close : test::expect_rows_close);
}

class SaapPrompts : public test::BucketsOnGpu {};

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
  BucketCalls calls(served, {40, 1}, DType::kBF16, Given::kPositions);
  // Blocks of 16 of 40, and the token.
  BucketBackends(served, 0.2, 16).replay(calls, 41, 4, test::expect_rows_close);
}

TEST_F(SaapPrompts, NanStaysInItsBlockAndGroup) {
  const Served served = test::serve_network(test::NetworkShape());
  BucketCalls calls(served, std::vector<int64_t>{32}, DType::kF32, Given::kBefore);
  // Token 18, head 5: the second block, KV head 1.
  const auto heads = static_cast<size_t>(served.options.query_heads);
  BucketBackends(served, 0.2, 16)
      .lose(calls, test::bucket_queries(served, 32, 5), (18 * heads + 5) * 128 + 17,
            [heads](size_t row) { return row / heads >= 16 && row % heads / 4 == 1; });
}

}  // namespace
}  // namespace sqz::cuda
