// Decoding on the GPU against the CPU backend: the same keys, the same attention.
#include <gmock/gmock.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <thread>

#include "libruntime/cuda/driver.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"
#include "tests/libruntime/cuda/blocks.h"

namespace sqz::cuda {
namespace {

using test::by_budget;
using test::cpu_session;
using test::DeviceCall;
using test::gpu_session;
using test::shape;
using test::with_thresholds;
using testing::make_queries;
using testing::Output;
using testing::serve;
using testing::Served;
using testing::TinyIndexOptions;

struct Tally {
  double keep = 0;  // of the clustered keys, on the GPU
};

// Both backends with the same queries: results, what was read, and the runs of the first request.
Tally compare(const Served& served, const SelectionRequest& selection, int64_t requests,
              DType dtype = DType::kBF16, float strength = 0.6f) {
  const auto gpu = gpu_session(served, selection);
  const auto cpu = cpu_session(served, selection);
  if (gpu == nullptr || cpu == nullptr) return {};
  uint64_t read = 0, possible = 0;
  for (int64_t layer = 0; layer < served.options.layers; ++layer) {
    const std::vector<float> queries = make_queries(served, layer, requests, 7, strength);
    DeviceCall call(served, layer, requests, dtype);
    call.set_queries(queries);
    const Status status = gpu->attend(call.call);
    EXPECT_TRUE(status.ok()) << status.message();
    const auto expected =
        testing::attend(*cpu, layer, queries,
                        {.dtype = dtype, .positions = {}, .indptr = test::single_tokens(requests)});
    EXPECT_TRUE(expected.ok()) << expected.status().message();
    if (requests > 1 && dtype != DType::kF32) {
      test::expect_rows_close(call.output(), *expected, served.options.head_dim);
    } else {
      test::expect_close(call.output(), *expected, served.options.head_dim);
    }

    const auto found = gpu->totals(layer);
    EXPECT_TRUE(found.ok());
    const Counters want = cpu->counters(layer);
    test::expect_same_counters(*found, want);
    read += found->keys_read;
    possible += found->keys_possible;

    const auto q = testing::stored(dtype, queries);
    testing::CallOptions options{
        .dtype = dtype, .positions = {}, .indptr = test::single_tokens(requests)};
    AttendCall host = testing::make_call(layer, requests, q.data(), options);
    if (cpu->selects(layer)) {
      EXPECT_TRUE(test::same_runs(test::runs_of(*gpu, call.call), test::runs_of(*cpu, host)));
    }
  }
  return {static_cast<double>(read) / static_cast<double>(std::max<uint64_t>(possible, 1))};
}

// That an H200 holds at once, of 2 blocks each and more.
constexpr int kTeams[] = {66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7};

TEST(TeamSizes, LargestThatAllRunAtOnce) {
  TeamSizes sizes;
  EXPECT_EQ(sizes.of(1), 1);  // none could be gathered
  std::copy(std::begin(kTeams), std::end(kTeams), sizes.teams + 2);
  EXPECT_EQ(sizes.of(1), kMostTeam);
  EXPECT_EQ(sizes.of(7), kMostTeam);
  EXPECT_EQ(sizes.of(8), 9);
  EXPECT_EQ(sizes.of(15), 8);
  EXPECT_EQ(sizes.of(16), 6);
  EXPECT_EQ(sizes.of(66), 2);
  EXPECT_EQ(sizes.of(67), 1);
}

class Decode : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

TEST_F(Decode, ShapesAndGroups) {
  for (const int64_t dim : {64, 96, 128, 256}) {
    for (const int64_t group : {1, 2, 4, 7, 8}) {
      SCOPED_TRACE(concat("dim ", dim, ", group ", group));
      const Served served = serve(shape(dim, group, {40, 211}));
      const Tally flat = compare(served, with_thresholds({2e-4}), 1);
      EXPECT_GT(flat.keep, 0.005);
      EXPECT_LT(flat.keep, 0.9);
      // Requests of a call are looked up together; one is by itself.
      for (const int64_t requests : {1, 2, 11}) {
        compare(served, with_thresholds({1e-4, 3e-4}), requests);
      }
      compare(served, with_thresholds({1e-4, 3e-4}), 11, DType::kF32);
      compare(served, by_budget(0.1), 2);
      if (HasFailure()) return;
    }
  }
}

TEST_F(Decode, Dtypes) {
  for (const DType stored : {DType::kBF16, DType::kF16}) {
    TinyIndexOptions o = shape(128, 4, {40, 211});
    o.dtype = stored;
    const Served served = serve(o);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(concat(dtype_name(stored), " and queries ", dtype_name(dtype)));
      compare(served, with_thresholds({1e-4, 3e-4}), 3, dtype);
    }
  }
}

TEST_F(Decode, LevelsAndRules) {
  const Served served = serve(shape(64, 4, {9, 70, 500}));
  for (const int64_t requests : {1, 3}) {
    compare(served, with_thresholds({2e-4, 2e-4, 2e-4}), requests);
    compare(served, with_thresholds({2e-4, 2e-4}), requests);
  }
  compare(served, by_budget(0.2), 3);
  for (const double keep : {0.02, 0.1, 0.24}) {
    for (const int levels : {1, 2, 3}) compare(served, by_budget(keep, levels), 3);
  }
}

// Thresholds of this index say that a score at the cutoff is expected to be far from what scores
// are (-12, log2), but for a share of .45; they are all the same, close together or far apart.
TEST_F(Decode, CutoffsOfBudgets) {
  const Served served = serve(shape(128, 4, {9, 70, 500}));
  for (const double keep : {0.01, 0.1, 0.45, 0.9}) {
    for (const float strength : {0.0f, 0.05f, 3.0f}) {
      SCOPED_TRACE(concat("keep ", keep, ", queries of ", strength));
      EXPECT_NEAR(compare(served, by_budget(keep, 1), 1, DType::kBF16, strength).keep, keep, 0.01);
      compare(served, by_budget(keep), 2, DType::kBF16, strength);
    }
  }
}

TEST_F(Decode, EverythingNothingAndOneCluster) {
  const Served served = serve(shape(128, 4, {40, 211}));
  EXPECT_EQ(compare(served, with_thresholds({0, 0}), 2).keep, 1);
  EXPECT_EQ(compare(served, with_thresholds({1, 1}), 2).keep, 0);
  EXPECT_EQ(compare(served, with_thresholds({0, 1}), 2).keep, 0);
  compare(serve(shape(128, 4, {1})), with_thresholds({1e-4}), 2);
  compare(serve(shape(128, 4, {1, 2})), with_thresholds({1e-4, 1e-4}), 2);
  TinyIndexOptions bare = shape(128, 4, {40, 211});
  bare.sink = bare.tail = 0;
  EXPECT_EQ(compare(serve(bare), with_thresholds({1, 1}), 2).keep, 0);
  for (const double threshold : {0.0, 1.0}) {
    EXPECT_EQ(compare(served, with_thresholds({threshold, threshold}), 9).keep, 1 - threshold);
    EXPECT_EQ(compare(serve(bare), with_thresholds({threshold, threshold}), 9).keep, 1 - threshold);
  }
}

TEST_F(Decode, DenseLayersAndSessions) {
  TinyIndexOptions o = shape(128, 4, {40, 211});
  o.dense_layers = {1};
  const Served served = serve(o);
  compare(served, by_budget(0.1), 3);
  SelectionRequest dense;
  dense.selector = SelectorKind::kDense;
  EXPECT_EQ(compare(served, dense, 3).keep, 1);
  SelectionRequest first = by_budget(0.1);
  first.dense_layers = 1;
  compare(serve(shape(128, 4, {40, 211})), first, 2);
}

TEST_F(Decode, ManyRequests) {
  // 400 requests are more pairs than one launch takes. No score, coarse or fine, lies within 6e-6 T
  // of these thresholds: 400 requests have 170,000 of them, and nearer ones are decided by
  // rounding.
  const Served served = serve(shape(64, 2, {40, 211}));
  for (const int64_t requests : {5, 17, 64, 400}) {
    SCOPED_TRACE(concat(requests, " requests"));
    compare(served, with_thresholds({1.14e-4, 4.07e-4}), requests);
    compare(served, with_thresholds({1.14e-4, 4.07e-4}), requests, DType::kF32);
    compare(served, by_budget(0.1), requests);
    compare(served, {.selector = SelectorKind::kDense}, requests);
    if (HasFailure()) return;
  }
}

// Requests that want most of the keys between them: reading everything would be faster the next
// time, but the next call reads the same and gives the same bits.
TEST_F(Decode, CallsDoNotDependOnCallsBefore) {
  TinyIndexOptions options = shape(64, 2, {40, 211});
  options.layers = 1;
  options.tokens = 70000;
  const Served served = serve(options);
  const auto gpu = gpu_session(served, with_thresholds({1e-5}));
  DeviceCall call(served, 0, 16, DType::kBF16);
  call.set_queries(make_queries(served, 0, 16, 7));
  Output first;
  uint64_t keys = 0;
  for (uint64_t calls = 1; calls <= 3; ++calls) {
    ASSERT_TRUE(gpu->attend(call.call).ok());
    if (calls == 1) first = call.output();
    EXPECT_EQ(call.output(), first);
    const auto totals = gpu->totals(0);
    ASSERT_TRUE(totals.ok());
    if (calls == 1) keys = totals->keys_read;
    EXPECT_EQ(totals->keys_read, calls * keys);
    EXPECT_LT(totals->keys_read, totals->keys_possible);
  }
}

TEST_F(Decode, Routes) {
  const Served served = serve(shape(64, 2, {40, 211}));
  const auto gpu = gpu_session(served, by_budget(0.1));
  EXPECT_STREQ(gpu->route(), "");
  DeviceCall one(served, 0, 1, DType::kBF16), many(served, 0, 16, DType::kBF16);
  one.set_queries(make_queries(served, 0, 1, 7));
  many.set_queries(make_queries(served, 0, 16, 7));
  const auto device = read_device(0);
  ASSERT_TRUE(device.ok());
  const char* const single = device->has_clusters() ? "decode" : "prefill-sm80";
  ASSERT_TRUE(gpu->attend(one.call).ok());
  EXPECT_STREQ(gpu->route(), single);
  ASSERT_TRUE(gpu->attend(many.call).ok());
  EXPECT_STREQ(gpu->route(), device->has_wgmma() ? "batch" : single);
}

TEST_F(Decode, Pages) {
  for (const int64_t page_size : {16, 7}) {
    SCOPED_TRACE(concat("pages of ", page_size));
    TinyIndexOptions o = shape(128, 4, {});
    o.page_size = page_size;
    SelectionRequest quest;
    quest.selector = SelectorKind::kQuest;
    quest.dense_layers = -1;
    quest.keep = 0.1;
    EXPECT_NEAR(compare(serve(o), quest, 3).keep, 0.1, 0.01);
  }
}

TEST_F(Decode, SelectorsThatLookAtNoQuery) {
  TinyIndexOptions o = shape(128, 4, {40, 211});
  o.heavy_hitters = true;
  const Served served = serve(o);
  for (const SelectorKind kind :
       {SelectorKind::kStream, SelectorKind::kWindow, SelectorKind::kH2o}) {
    SelectionRequest request;
    request.selector = kind;
    for (const double keep : {0.001, 0.1, 0.7}) {
      SCOPED_TRACE(concat("selector ", static_cast<int>(kind), ", keep ", keep));
      request.keep = keep;
      request.rule = keep > 0.5 ? RuleKind::kBudget : RuleKind::kThreshold;  // it has none
      const Tally tally = compare(served, request, 3);
      EXPECT_NEAR(tally.keep, keep, 0.001);
    }
    // A layer that is read whole has its sink.
    request.keep = 0.1;
    request.dense_layers = 1;
    TinyIndexOptions other = shape(64, 7, {40, 211});
    other.heavy_hitters = true;
    compare(serve(other), request, 400);
  }
}

TEST_F(Decode, OneHeadTakesMost) {
  // Head 0 wants nearly everything, the others next to nothing.
  const Served served = serve(shape(128, 4, {40, 211}));
  const auto selection = with_thresholds({1.9e-4});
  const auto gpu = gpu_session(served, selection);
  const auto cpu = cpu_session(served, selection);
  std::vector<float> queries = make_queries(served, 0, 1, 3, 1.0f);
  const auto head = static_cast<size_t>(4 * served.options.head_dim);
  for (size_t i = 0; i < head; ++i) queries[i] *= 1e-3f;
  DeviceCall call(served, 0, 1, DType::kF32);
  call.set_queries(queries);
  ASSERT_TRUE(gpu->attend(call.call).ok());
  test::expect_close(call.output(), *testing::attend(*cpu, 0, queries), 128);
  const auto runs = test::runs_of(*gpu, call.call);
  std::vector<uint64_t> keys;
  for (const auto& list : runs) {
    keys.push_back(0);
    for (const KeyRun& run : list) keys.back() += run.length;
  }
  EXPECT_GT(keys[0], 3 * (keys[1] + keys[2]));
}

TEST_F(Decode, GraphReplayWithOtherQueries) {
  const Served served = serve(shape(128, 4, {40, 211}));
  const auto selection = with_thresholds({1e-4, 3e-4});
  const auto gpu = gpu_session(served, selection);
  const auto cpu = cpu_session(served, selection);
  DeviceCall call(served, 0, 3, DType::kBF16);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  call.call.stream = stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_TRUE(gpu->attend(call.call).ok());
  ASSERT_TRUE(gpu->attend(call.call).ok());  // twice: the second must not disturb the first
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (const uint64_t seed : {1, 2, 3}) {
    const std::vector<float> queries = make_queries(served, 0, 3, seed);
    call.set_queries(queries, stream);
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const auto expected = testing::attend(
        *cpu, 0, queries, {.dtype = DType::kBF16, .positions = {}, .indptr = {0, 1, 2, 3}});
    test::expect_close(call.output(), *expected, 128);
  }
  EXPECT_EQ(gpu->totals(0)->selections, 3u * 2 * 3);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(Decode, SameBitsAgain) {
  const Served served = serve(shape(128, 4, {40, 211}));
  for (const SelectionRequest& request : {with_thresholds({1e-4, 1e-4}), by_budget(0.1)}) {
    for (const auto& [requests, dtype] : {std::pair{4, DType::kF32}, {40, DType::kBF16}}) {
      const auto gpu = gpu_session(served, request);
      DeviceCall call(served, 0, requests, dtype);
      call.set_queries(make_queries(served, 0, requests, 5));
      ASSERT_TRUE(gpu->attend(call.call).ok());
      const Output first = call.output();
      for (int i = 0; i < 20; ++i) {
        ASSERT_TRUE(gpu->attend(call.call).ok());
        ASSERT_EQ(call.output(), first);
      }
    }
  }
}

TEST_F(Decode, TheThreadsContextStays) {
  const Served served = serve(shape(128, 4, {40, 211}));
  DeviceCall call(served, 0, 3, DType::kBF16);
  call.set_queries(make_queries(served, 0, 3, 5));
  decltype(&cuCtxGetCurrent) current = nullptr;
  ASSERT_TRUE(find_driver_function("cuCtxGetCurrent", current).ok());
  std::thread([&] {
    CUcontext context = nullptr;
    {
      const auto gpu = gpu_session(served, by_budget(0.1));
      EXPECT_TRUE(gpu->attend(call.call).ok());
      EXPECT_TRUE(gpu->totals(-1).ok());
    }
    EXPECT_EQ(current(&context), CUDA_SUCCESS);
    EXPECT_EQ(context, nullptr);
  }).join();
}

TEST_F(Decode, ANegativeBlockIsRefused) {
  const Served served = serve(shape(128, 4, {40, 211}));
  SessionOptions options;
  options.selection = by_budget(0.1);
  options.block = -1;
  const auto session = create_session(served.index, test::uploaded(served), options);
  EXPECT_EQ(session.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(session.status().message(), ::testing::HasSubstr("block: found -1"));
}

TEST_F(Decode, TwoStreams) {
  const Served served = serve(shape(128, 4, {40, 211}));
  const auto selection = with_thresholds({1e-4, 1e-4});
  auto index = test::uploaded(served);
  const auto cpu = cpu_session(served, selection);
  struct Lane {
    std::unique_ptr<ServingSession> session;
    std::unique_ptr<DeviceCall> call;
    cudaStream_t stream = nullptr;
  };
  std::vector<Lane> lanes(2);
  for (size_t i = 0; i < lanes.size(); ++i) {
    SessionOptions options;
    options.selection = selection;
    lanes[i].session = std::move(*create_session(served.index, index, options));
    lanes[i].call = std::make_unique<DeviceCall>(served, 0, 2, DType::kF32);
    ASSERT_EQ(cudaStreamCreateWithFlags(&lanes[i].stream, cudaStreamNonBlocking), cudaSuccess);
    lanes[i].call->set_queries(make_queries(served, 0, 2, 10 + i));
    lanes[i].call->call.stream = lanes[i].stream;
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int round = 0; round < 50; ++round) {
    for (Lane& lane : lanes) ASSERT_TRUE(lane.session->attend(lane.call->call).ok());
  }
  for (size_t i = 0; i < lanes.size(); ++i) {
    ASSERT_EQ(cudaStreamSynchronize(lanes[i].stream), cudaSuccess);
    const auto expected =
        testing::attend(*cpu, 0, make_queries(served, 0, 2, 10 + i),
                        {.dtype = DType::kF32, .positions = {}, .indptr = {0, 1, 2}});
    test::expect_close(lanes[i].call->output(), *expected, 128);
    cudaStreamDestroy(lanes[i].stream);
  }
}

TEST_F(Decode, NanStaysInItsGroup) {
  const Served served = serve(shape(128, 4, {40, 211}));
  struct Case {
    bool dense;
    int64_t requests;
    DType dtype;
  };
  for (const Case& c :
       {Case{false, 2, DType::kF32}, Case{true, 2, DType::kF32}, Case{false, 9, DType::kBF16}}) {
    SelectionRequest selection = with_thresholds({1e-4, 1e-4});
    if (c.dense) selection = {.selector = SelectorKind::kDense};
    const auto gpu = gpu_session(served, selection);
    std::vector<float> queries = make_queries(served, 0, c.requests, 5);
    DeviceCall call(served, 0, c.requests, c.dtype);
    call.set_queries(queries);
    ASSERT_TRUE(gpu->attend(call.call).ok());
    const Output clean = call.output();
    // Token 1, head 5: KV head 1.
    const auto dim = static_cast<size_t>(served.options.head_dim);
    const auto heads = static_cast<size_t>(served.options.query_heads);
    queries[(heads + 5) * dim + 17] = NAN;
    call.set_queries(queries);
    ASSERT_TRUE(gpu->attend(call.call).ok());
    const Output found = call.output();
    EXPECT_TRUE(std::isnan(found.lse[heads + 5]));
    EXPECT_TRUE(std::isnan(found.out[(heads + 5) * dim]));
    for (size_t row = 0; row < static_cast<size_t>(c.requests) * heads; ++row) {
      if (row / 4 == (heads + 5) / 4) continue;
      // Rows that shared keys with it have them in other tiles.
      EXPECT_NEAR(found.lse[row], clean.lse[row], c.requests > 2 ? 1e-3 : 0) << row;
    }
  }
}

// At the end of float32 and beyond it: as on the CPU, whose errors are NaN here.
TEST_F(Decode, NumbersThatFloat32CannotHold) {
  const Served served = serve(shape(64, 4, {40}));
  const DType stored = served.index->metadata().dtype;
  const auto filled = [&](float x) {
    return testing::stored(stored, std::vector<float>(3 * 4321 * 64, x));
  };
  const auto ones = filled(1), huge = filled(3e38f), large = filled(1e5f);
  SessionOptions options;
  const auto attend = [&](const std::vector<std::byte>& values, float query, DType dtype) {
    ServedIndex index = *served.index;
    for (LayerView& view : index.layers) {
      view.keys = view.exact_keys = view.level[0].centroids = ones.data();
      view.values = view.exact_values = values.data();
    }
    const Served changed = {served.options, std::make_shared<const ServedIndex>(index)};
    const auto session = create_session(changed.index, test::uploaded(changed), options);
    EXPECT_TRUE(session.ok()) << session.status().message();
    DeviceCall call(changed, 0, 1, dtype);
    call.set_queries(std::vector<float>(3 * 4 * 64, query));
    EXPECT_TRUE((*session)->attend(call.call).ok());
    return call.output();
  };
  const auto expect_nan = [](const Output& found) {
    for (const float x : found.lse) ASSERT_TRUE(std::isnan(x));
    for (const float x : found.out) ASSERT_TRUE(std::isnan(x));
  };
  for (const bool sm80 : {false, true}) {
    for (const bool dense : {true, false}) {
      SCOPED_TRACE(concat("sm80 ", sm80, ", dense ", dense));
      options.sm80_kernels = sm80;
      options.selection = with_thresholds({1e-9});
      if (dense) options.selection = {.selector = SelectorKind::kDense};
      for (const float query : {-3e38f, 3e38f}) expect_nan(attend(large, query, DType::kF32));
      const Output low = attend(large, -2e36f, DType::kF32);
      for (const float x : low.lse) ASSERT_NEAR(x / -1.6e37, 1, 1e-2);
      for (const float x : low.out) ASSERT_NEAR(x, 1e5, 400);
      for (const float x : attend(large, 0, DType::kF16).out) ASSERT_EQ(x, 65504);
      expect_nan(attend(huge, 0, DType::kF32));
    }
  }
}

}  // namespace
}  // namespace sqz::cuda
