// The selector saap on the GPU against the CPU backend: the same buckets, the same attention.
#include <gmock/gmock.h>

#include "formats/base/dtype.h"
#include "libruntime/kernels/cuda/prefill/classify/weights.h"
#include "tests/libruntime/cuda/bucket_backends.h"

namespace sqz::cuda {
namespace {

using ::testing::HasSubstr;
using testing::Served;

using Shape = test::NetworkShape;
using Calls = test::BucketCalls;
using test::BucketBackends;
using test::BucketQueries;
using test::Given;
using test::network;
using test::serve_network;

BucketQueries make_queries(const Served& served, int64_t requests, uint64_t seed) {
  return test::bucket_queries(served, requests, seed);
}

// Requests of one token each. Returns the share of the clustered keys that were read.
double compare(const Served& served, double share, int64_t requests, DType dtype = DType::kBF16,
               Given given = Given::kBefore, uint64_t seed = 7) {
  Calls calls(served, requests, dtype, given);
  return BucketBackends(served, share)
      .compare(calls, make_queries(served, requests, seed), test::expect_close);
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

class SaapOnGpu : public test::BucketsOnGpu {};

TEST_F(SaapOnGpu, ShapesAndGroups) {
  for (const int64_t dim : {64, 96, 128, 256}) {
    for (const int64_t group : {1, 2, 4, 7, 8}) {
      SCOPED_TRACE(concat("dim ", dim, ", group ", group));
      const Served served = serve_network(Shape{.dim = dim, .group = group});
      EXPECT_NEAR(compare(served, 0.2, 1), 0.2, 0.03);
      compare(served, 0.2, 3, DType::kF32);
      compare(served, 0.1, 5, DType::kF16, Given::kPositions);
      compare(served, 0.4, 1, DType::kF32, Given::kPositions);
      if (HasFailure()) return;
    }
  }
}

TEST_F(SaapOnGpu, NetworksOfAnySize) {
  for (const auto& [buckets, hidden] : test::kNetworkSizes) {
    SCOPED_TRACE(concat(buckets, " buckets, ", hidden, " hidden units"));
    const Served served = serve_network(
        Shape{.dim = 128, .group = 4, .heads = 2, .buckets = buckets, .hidden = hidden});
    for (const int64_t requests : {1, 2, 9, 40})
      compare(served, 0.3, requests, DType::kF32, Given::kBefore, 8);
    if (HasFailure()) return;
  }
}

TEST_F(SaapOnGpu, EmptyBucketsEverythingAndNothing) {
  const Served sparse =
      serve_network(Shape{.dim = 64, .group = 2, .buckets = 201, .hidden = 20, .empty = 90});
  for (const double share : {1e-5, 0.01, 0.3, 0.9999}) {
    SCOPED_TRACE(share);
    for (const int64_t requests : {1, 3}) {
      EXPECT_NEAR(compare(sparse, share, requests, DType::kF32), share, 0.03);
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
  for (const int64_t requests : {1, 40}) EXPECT_NEAR(compare(served, 0.2, requests), 0.2, 0.01);
}

TEST_F(SaapOnGpu, ManyRequests) {
  const Served served = serve_network(Shape{.dim = 64, .group = 2, .heads = 1});
  for (const int64_t requests : {17, 128, 129, 300}) {
    SCOPED_TRACE(concat(requests, " requests"));
    compare(served, 0.1, requests);
    compare(served, 0.1, requests, DType::kF32, Given::kPositions);
    if (HasFailure()) return;
  }
}

TEST_F(SaapOnGpu, RoundedWeightsNameTheSameBuckets) {
  const Served served = serve_network(Shape{.buckets = 512, .hidden = 256, .rounded = false});
  const BucketBackends both(served, 0.1);
  int64_t chosen = 0, shared = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Calls calls(served, 1, DType::kF32, Given::kBefore);
    calls.set(make_queries(served, 1, seed));
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
  const Served served = serve_network(Shape());
  Calls calls(served, 3, DType::kBF16, Given::kBefore);
  BucketBackends(served, 0.2).replay(calls, 3, 3, test::expect_close);
}

TEST_F(SaapOnGpu, NanStaysInItsGroup) {
  const Served served = serve_network(Shape());
  Calls calls(served, 2, DType::kF32, Given::kBefore);
  // Token 1, head 5: KV head 1.
  const size_t row = static_cast<size_t>(served.options.query_heads) + 5;
  BucketBackends(served, 0.2)
      .lose(calls, make_queries(served, 2, 5), row * 128 + 17,
            [row](size_t other) { return other / 4 == row / 4; });
}

TEST_F(SaapOnGpu, SaysWhatItCannotServe) {
  const Served served = serve_network(Shape());
  const auto gpu = test::gpu_session(served, test::keep_buckets(0.2));
  Calls calls(served, 2, DType::kF32, Given::kBefore);
  calls.set(make_queries(served, 2, 5));
  AttendCall call = calls.gpu();
  call.q_before_rope = nullptr;
  Status status = gpu->attend(call);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("positions: found null"));
  call.layer = 0;  // dense
  EXPECT_TRUE(gpu->attend(call).ok());
  SessionOptions options;
  options.selection = test::keep_buckets(0.2);
  options.max_request_tokens = 1;
  const auto single = create_session(served.index, test::uploaded(served), options);
  ASSERT_TRUE(single.ok()) << single.status().message();
  call = calls.gpu();
  EXPECT_TRUE((*single)->attend(call).ok());
  call.indptr = nullptr;
  call.requests = 0;
  status = (*single)->attend(call);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("a request with several query tokens"));
}

TEST_F(SaapOnGpu, ManyHiddenUnits) {
  compare(serve_network(Shape{.buckets = 20, .hidden = 9000}), 0.2, 3, DType::kF32);
}

TEST_F(SaapOnGpu, WeightsBeyondFloat16AreRefusedAndNothingStays) {
  QmodelFile q = network({.dim = 128, .group = 4, .heads = 3, .buckets = 1100, .hidden = 1024});
  const Served fine = serve_network(q);
  q.layers[1].output_weight[q.layers[1].output_weight.size() - 3] = 1e5f;
  const Served beyond = serve_network(q);
  { const auto warm = test::uploaded(fine); }
  size_t before = 0, after = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  for (int i = 0; i < 8; ++i) {
    const auto refused = upload_index(beyond.index, {.device = 0});
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::kUnsupported);
    EXPECT_THAT(refused.status().message(), HasSubstr("layers.1.classifier weights: found"));
  }
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  // An upload has more than 15 MiB; the driver may keep some of its own.
  EXPECT_GE(after + (size_t{16} << 20), before);
}

}  // namespace
}  // namespace sqz::cuda
