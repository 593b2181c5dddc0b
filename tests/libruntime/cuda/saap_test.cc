// The selector saap on the GPU against the CPU backend: the same buckets, the same attention.
#include <gmock/gmock.h>

#include "formats/base/dtype.h"
#include "libruntime/kernels/cuda/prefill/classify/kernel.h"
#include "libruntime/kernels/cuda/prefill/classify/weights.h"
#include "tests/libruntime/cuda/buckets.h"

namespace sqz::cuda {
namespace {

using ::testing::HasSubstr;
using testing::Served;

using Calls = test::BucketCalls;
using test::bucket_queries;
using test::BucketBackends;
using test::Given;
using test::Lengths;
using test::network;
using test::serve_network;
using test::single_tokens;

struct How {
  int64_t block = 0;
  DType dtype = DType::kBF16;
  Given given = Given::kBefore;
  float drift = 0;
};
const How kF32 = {.dtype = DType::kF32};

// Returns the share of the clustered keys that were read.
double compare(const Served& served, double share, const Lengths& lengths, const How& how = {},
               uint64_t seed = 7) {
  Calls calls(served, lengths, how.dtype, how.given);
  const int64_t tokens = calls.gpu().tokens;
  const bool exact = how.dtype == DType::kF32 || lengths == single_tokens(tokens);
  return BucketBackends(served, share, how.block)
      .compare(calls, bucket_queries(served, tokens, seed, how.drift),
               exact ? test::expect_close : test::expect_rows_close);
}

TEST(ClassifierWeights, AreTilesOfLanes) {
  constexpr int64_t kRows = 11, kColumns = 45;
  std::vector<float> from(kRows * kColumns);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i) - 100;
  std::vector<uint16_t> to(static_cast<size_t>(weight_bytes(kRows, kColumns)) / 2, 0x7777);
  ASSERT_EQ(to.size(), 2u * 2 * 8 * 32);
  ASSERT_TRUE(pack_weights(from.data(), kRows, kColumns, to.data()));
  for (int64_t row = 0; row < 16; ++row) {
    for (int64_t column = 0; column < 64; ++column) {
      const int64_t tile = row / 8 * 2 + column / 32;
      const int64_t lane = row % 8 * 4 + column % 32 / 8;
      const float x =
          to_float(Float16{to[static_cast<size_t>(tile * 256 + lane * 8 + column % 8)]});
      const bool inside = row < kRows && column < kColumns;
      ASSERT_EQ(x, inside ? from[static_cast<size_t>(row * kColumns + column)] : 0)
          << row << " " << column;
    }
  }
  for (const float bad : {NAN, 65505.0f, -1e6f, INFINITY}) {
    from.back() = bad;
    EXPECT_FALSE(pack_weights(from.data(), kRows, kColumns, to.data())) << bad;
  }
}

class SaapOnGpu : public test::OnGpu {};

TEST_F(SaapOnGpu, NetworksOfAnySize) {
  for (const auto& [buckets, hidden] : test::kNetworkSizes) {
    SCOPED_TRACE(concat(buckets, " buckets, ", hidden, " hidden units"));
    const Served served =
        serve_network({.dim = 128, .group = 4, .heads = 2, .buckets = buckets, .hidden = hidden});
    for (const int64_t requests : {1, 2, 9, 129}) {
      compare(served, 0.3, single_tokens(requests), kF32, 8);
    }
    compare(served, 0.3, {40}, kF32);
    compare(served, 0.3, {5, 1, 20}, {.block = 8, .dtype = DType::kF32});
    if (HasFailure()) return;
  }
}

TEST_F(SaapOnGpu, EmptyBucketsEverythingAndNothing) {
  const Served sparse =
      serve_network({.dim = 64, .group = 2, .buckets = 201, .hidden = 20, .empty = 90});
  for (const double share : {1e-5, 0.01, 0.3, 0.9999}) {
    SCOPED_TRACE(share);
    for (const Lengths& lengths : {Lengths{1}, {1, 1, 1}, {30, 2}}) {
      EXPECT_NEAR(compare(sparse, share, lengths, {.block = 16, .dtype = DType::kF32}), share,
                  0.03);
    }
  }
}

TEST_F(SaapOnGpu, OfEqualBucketsTheFirst) {
  QmodelFile q = network({.heads = 2, .buckets = 64});  // 63 with keys: 67 in each
  for (QmodelLayer& layer : q.layers) {
    std::fill(layer.output_weight.begin(), layer.output_weight.end(), 0.0f);
    std::fill(layer.output_bias.begin(), layer.output_bias.end(), 0.0f);
  }
  const Served served = serve_network(q, 1, true);
  EXPECT_NEAR(compare(served, 0.2, {1}), 0.2, 0.01);
  EXPECT_NEAR(compare(served, 0.2, single_tokens(40)), 0.2, 0.01);
}

// More tokens than go through the networks at once: blocks that lie in several stretches.
TEST_F(SaapOnGpu, BlocksOfSeveralStretches) {
  const Served served = serve_network({.dim = 64, .group = 2, .heads = 1});
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
TEST_F(SaapOnGpu, PrecisionOfQueries) {
  const Served served =
      serve_network({.dim = 64, .group = 1, .heads = 1, .buckets = 1024, .hidden = 256});
  compare(served, 0.1, Lengths(250, 2), kF32);
}

TEST_F(SaapOnGpu, RoundedWeightsNameTheSameBuckets) {
  const Served served = serve_network({.buckets = 512, .hidden = 256, .rounded = false});
  const BucketBackends both(served, 0.1);
  int64_t chosen = 0, shared = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Calls calls(served, {1}, DType::kF32, Given::kBefore);
    calls.set(bucket_queries(served, 1, seed));
    const auto found = test::runs_of(*both.gpu, calls.gpu()),
               want = test::runs_of(*both.cpu, calls.cpu());
    for (size_t h = 0; h < want.size(); ++h) {
      std::vector<bool> is(static_cast<size_t>(test::kBucketTokens));
      for (const KeyRun& run : found[h]) std::fill_n(is.begin() + run.first, run.length, true);
      for (const KeyRun& run : want[h]) {
        chosen += run.length;
        shared += std::count(is.begin() + run.first, is.begin() + run.first + run.length, true);
      }
    }
  }
  RecordProperty("keys", std::to_string(chosen));
  RecordProperty("shared", std::to_string(shared));
  EXPECT_GE(static_cast<double>(shared), 0.998 * static_cast<double>(chosen)) << chosen;
  EXPECT_LT(shared, chosen) << "the rounding is seen";
}

TEST_F(SaapOnGpu, GraphReplayWithOtherQueries) {
  const Served served = serve_network(test::NetworkShape());
  Calls tokens(served, {1, 1, 1}, DType::kBF16, Given::kBefore);
  BucketBackends(served, 0.2).replay(tokens, 3, 3, test::expect_close);
  Calls prompt(served, {40, 1}, DType::kBF16, Given::kPositions);
  // Blocks of 16 of 40, and the token.
  BucketBackends(served, 0.2, 16).replay(prompt, 41, 4, test::expect_rows_close);
}

TEST_F(SaapOnGpu, NanStaysInItsBlockAndGroup) {
  const Served served = serve_network(test::NetworkShape());
  const auto heads = static_cast<size_t>(served.options.query_heads);
  // Head 5 is one of KV head 1, token 18 of the second block.
  Calls tokens(served, {1, 1}, DType::kF32, Given::kBefore);
  BucketBackends(served, 0.2)
      .lose(tokens, bucket_queries(served, 2, 5), (heads + 5) * 128 + 17,
            [heads](size_t row) { return row / 4 == (heads + 5) / 4; });
  Calls prompt(served, {32}, DType::kF32, Given::kBefore);
  BucketBackends(served, 0.2, 16)
      .lose(prompt, bucket_queries(served, 32, 5), (18 * heads + 5) * 128 + 17,
            [heads](size_t row) { return row / heads >= 16 && row % heads / 4 == 1; });
}

TEST_F(SaapOnGpu, SaysWhatItCannotServe) {
  const Served served = serve_network(test::NetworkShape());
  const auto gpu = test::gpu_session(served, test::keep_buckets(0.2));
  Calls calls(served, {1, 1}, DType::kF32, Given::kBefore);
  calls.set(bucket_queries(served, 2, 5));
  AttendCall call = calls.gpu();
  call.q_before_rope = nullptr;
  Status status = gpu->attend(call);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("positions: found null"));
  call.layer = 0;  // dense
  EXPECT_TRUE(gpu->attend(call).ok());
  SessionOptions options;
  options.max_request_tokens = 1;
  const auto single = test::gpu_session(served, test::keep_buckets(0.2), options);
  call = calls.gpu();
  EXPECT_TRUE(single->attend(call).ok());
  call.indptr = nullptr;
  call.requests = 0;
  status = single->attend(call);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("a request with several query tokens"));
}

TEST_F(SaapOnGpu, ManyHiddenUnits) {
  compare(serve_network(test::NetworkShape{.buckets = 20, .hidden = 9000}), 0.2, {1, 1, 1}, kF32);
}

TEST_F(SaapOnGpu, WeightsBeyondFloat16AreRefused) {
  QmodelFile q = network({.dim = 128, .group = 4, .heads = 3, .buckets = 1100, .hidden = 1024});
  q.layers[1].output_weight[q.layers[1].output_weight.size() - 3] = 1e5f;
  const auto refused = upload_index(serve_network(q).index, {.device = 0});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kUnsupported);
  EXPECT_THAT(refused.status().message(), HasSubstr("layers.1.classifier weights: found"));
}

}  // namespace
}  // namespace sqz::cuda
