// Sessions at once on one GPU: threads that attend, that capture graphs, and that upload, create
// and destroy, all beside each other. Nobody meets an error or other bits.
// SQZ_THREADS_SECONDS=600 runs it for ten minutes.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "tests/libruntime/cuda/blocks.h"

namespace sqz::cuda {
namespace {

using test::DeviceCall;
using testing::Served;

// A session, a call of it on a stream of its own, and what the call gives alone.
class Caller {
 public:
  Caller(const Served& served, const SelectionRequest& selection, int64_t requests)
      : session_(test::gpu_session(served, selection)),
        call_(served, 0, test::single_tokens(requests), DType::kBF16),
        bytes_(static_cast<size_t>(requests * served.options.query_heads * served.options.head_dim *
                                   2)) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    call_.set_queries(testing::make_queries(served, 0, requests, 7));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    call_.call.stream = stream_;
    attend();
    expected_ = result();
  }
  ~Caller() { cudaStreamDestroy(stream_); }

  void attend() {
    const Status status = session_->attend(call_.call);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  // The same as alone.
  void check() { EXPECT_TRUE(result() == expected_) << "other bits"; }
  void capture_and_replay() {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    for (int i = 0; i < 20; ++i) attend();
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess) << "another thread broke it";
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
    check();
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }

 private:
  std::vector<std::byte> result() {
    std::vector<std::byte> out(bytes_);
    EXPECT_EQ(cudaMemcpyAsync(out.data(), call_.call.out, bytes_, cudaMemcpyDeviceToHost, stream_),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return out;
  }

  std::unique_ptr<ServingSession> session_;
  DeviceCall call_;
  size_t bytes_;
  cudaStream_t stream_ = nullptr;
  std::vector<std::byte> expected_;
};

TEST(Threads, SessionsUploadsAndCaptures) {
  SQZ_SKIP_WITHOUT_GPU();
  const char* seconds = std::getenv("SQZ_THREADS_SECONDS");
  const std::chrono::seconds length(seconds == nullptr ? 4 : std::atoi(seconds));
  // Indexes of several sizes: the same kernels want different amounts of shared memory.
  const Served small = testing::serve(test::shape(128, 4, {40, 211})),
               large = testing::serve(test::shape(128, 4, {300, 1900}));
  const auto thresholds = test::with_thresholds({1e-4, 3e-4});
  // Made before the threads begin, since the tests' own memory is not for other threads' captures.
  Caller first(small, thresholds, 1), second(large, test::by_budget(0.1), 1);
  Caller batch(large, thresholds, 16), captured(small, test::by_budget(0.2), 1);
  std::atomic<bool> stop = false;
  std::atomic<int64_t> calls = 0, graphs = 0, sessions = 0;
  const auto until_stopped = [&](std::atomic<int64_t>& count, const auto& body) {
    return std::thread([&stop, &count, body] {
      auto mode = cudaStreamCaptureModeRelaxed;  // of what the test itself asks of CUDA
      cudaThreadExchangeStreamCaptureMode(&mode);
      while (!stop && !::testing::Test::HasFailure()) {
        body();
        ++count;
      }
    });
  };
  std::vector<std::thread> threads;
  for (Caller* caller : {&first, &second, &batch}) {
    threads.push_back(until_stopped(calls, [caller] {
      for (int i = 0; i < 5; ++i) caller->attend();
      caller->check();
    }));
  }
  threads.push_back(until_stopped(graphs, [&] { captured.capture_and_replay(); }));
  threads.push_back(until_stopped(sessions, [&] {
    const auto session = test::gpu_session(large, thresholds);
    EXPECT_TRUE(session != nullptr && session->totals(0).ok() && session->clear_totals().ok());
  }));
  std::this_thread::sleep_for(length);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  std::printf("[          ] %ld rounds of calls, %ld graphs, %ld uploads and sessions\n",
              calls.load(), graphs.load(), sessions.load());
  EXPECT_GT(graphs, 0);
  EXPECT_GT(sessions, 0);
}

}  // namespace
}  // namespace sqz::cuda
