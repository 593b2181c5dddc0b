// Sessions on the GPU with several query tokens a request, against the CPU backend.
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
               const std::vector<int64_t>& lengths, int64_t block) {
  return test::compare_blocks(served, selection, lengths,
                              {.block = block, .dtype = served.options.dtype});
}

class PrefillServing : public ::testing::Test {
 protected:
  void SetUp() override {
    SQZ_SKIP_WITHOUT_GPU();
    if (!test::have_hopper()) GTEST_SKIP() << "no device of compute capability 9.0";
  }
};

TEST_F(PrefillServing, ShapesAndRules) {
  for (const int64_t dim : {64, 96, 128, 256}) {
    for (const int64_t group : {1, 4, 7}) {
      SCOPED_TRACE(concat("dim ", dim, ", group ", group));
      const Served served = serve(shape(dim, group, {40, 211}));
      const double flat = compare(served, with_thresholds({2e-4}), {70}, 32);
      EXPECT_GT(flat, 0.005);
      EXPECT_LT(flat, 0.9);
      compare(served, with_thresholds({1e-4, 3e-4}), {70}, 32);
      compare(served, by_budget(0.1), {70}, 32);
      if (HasFailure()) return;
    }
  }
}

// Requests that end within a block, and single tokens, whose thresholds and shares are others.
TEST_F(PrefillServing, RaggedRequests) {
  const Served served = serve(shape(128, 4, {40, 211}));
  compare(served, by_budget(0.1), {1, 40, 33, 0, 1, 64, 5}, 32);
  compare(served, with_thresholds({1e-4, 3e-4}), {7, 1, 100}, 0);
  // More blocks than one part of a table holds.
  compare(served, by_budget(0.05), std::vector<int64_t>(300, 2), 2);
}

TEST_F(PrefillServing, Dense) {
  const Served served = serve(shape(128, 4, {40, 211}));
  SelectionRequest dense;
  dense.selector = SelectorKind::kDense;
  EXPECT_EQ(compare(served, dense, {50}, 0), 1.0);
  EXPECT_EQ(compare(served, dense, {2}, 0), 1.0);
  EXPECT_EQ(compare(served, dense, {50, 3}, 32), 1.0);
}

// The keys are known, so all tokens of a call share them; counted as on the CPU.
TEST_F(PrefillServing, SelectorsThatLookAtNoQuery) {
  TinyIndexOptions o = shape(128, 4, {40, 211});
  o.heavy_hitters = true;
  const Served served = serve(o);
  for (const SelectorKind kind :
       {SelectorKind::kStream, SelectorKind::kWindow, SelectorKind::kH2o}) {
    SCOPED_TRACE(concat("selector ", static_cast<int>(kind)));
    SelectionRequest request;
    request.selector = kind;
    request.keep = 0.1;
    EXPECT_NEAR(compare(served, request, {70}, 32), 0.1, 0.001);
    compare(served, request, {1, 40, 33, 0, 5}, 32);
    compare(served, request, {7, 100}, 0);
  }
}

// A graph keeps the table of blocks, and takes the queries that are there when it runs.
TEST_F(PrefillServing, GraphReplay) {
  const Served served = serve(shape(128, 4, {40, 211}));
  SessionOptions options;
  options.selection = by_budget(0.1);
  options.block = 16;
  const auto session = create_session(served.index, test::uploaded(served), options);
  ASSERT_TRUE(session.ok()) << session.status().message();
  const std::vector<int64_t> indptr = {0, 30, 37, 70};
  test::DeviceCall call(served, 1, 70, DType::kBF16);
  call.call.indptr = indptr.data();
  call.call.requests = 3;
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  call.call.stream = stream;
  call.set_queries(make_queries(served, 1, 70, 1, 0.6f), stream);
  ASSERT_TRUE((*session)->attend(call.call).ok());
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  const Status status = (*session)->attend(call.call);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (const uint64_t seed : {2, 3}) {
    const auto queries = make_queries(served, 1, 70, seed, 0.6f);
    call.set_queries(queries, stream);
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const auto replayed = call.output();
    ASSERT_TRUE((*session)->attend(call.call).ok());
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const auto direct = call.output();
    EXPECT_EQ(replayed.out, direct.out);
    EXPECT_EQ(replayed.lse, direct.lse);
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace sqz::cuda
